"""OpenAI's SDK, on chats or on responses."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import scenarios as s


class Chat:
    def __init__(self, tiny: str, scripted: str, asked: s.Asked) -> None:
        self.tiny, self.scripted = (
            openai.OpenAI(base_url=f"{url}/v1", api_key=s.KEY, timeout=s.TIMEOUT_S) for url in (tiny, scripted)
        )
        self.asked = asked

    def ask(self, client: openai.OpenAI, question: str, **fields: Any) -> Any:
        return client.chat.completions.create(**{"model": s.MODEL, "messages": s.turns(question), **fields})

    def plain(self) -> str:
        return self.ask(self.tiny, s.QUESTION).choices[0].message.content

    def stream(self) -> Iterator[str]:
        for chunk in self.ask(self.tiny, s.QUESTION, stream=True, stream_options={"include_usage": True}):
            yield from (choice.delta.content for choice in chunk.choices)

    def tools(self) -> str:
        turns = s.turns(s.TOOLS_QUESTION)
        while True:
            message = self.ask(self.scripted, "", messages=turns, tools=[s.TOOL]).choices[0].message
            if not message.tool_calls:
                return message.content
            turns.append(message)
            for call in message.tool_calls:
                result = self.asked.weather(**json.loads(call.function.arguments))
                turns.append({"role": "tool", "tool_call_id": call.id, "content": result})

    def schema(self) -> dict[str, Any]:
        schema = {"name": "report", "schema": s.REPORT_SCHEMA, "strict": True}
        asked = {"type": "json_schema", "json_schema": schema}
        return json.loads(self.ask(self.tiny, s.REPORT_QUESTION, response_format=asked).choices[0].message.content)

    def error(self) -> Exception:
        return s.catch(openai.BadRequestError, lambda: self.ask(self.tiny, s.QUESTION, temperature=s.BAD_TEMPERATURE))

    def abort(self) -> None:
        with self.ask(self.scripted, s.ABORT_QUESTION, stream=True) as stream:
            next(iter(stream))


class Responses(Chat):
    def ask(self, client: openai.OpenAI, question: str, **fields: Any) -> Any:
        return client.responses.create(**{"model": s.MODEL, "input": question, **fields})

    def plain(self) -> str:
        return self.ask(self.tiny, s.QUESTION).output_text

    def stream(self) -> Iterator[str]:
        for event in self.ask(self.tiny, s.QUESTION, stream=True):
            if event.type == "response.output_text.delta":
                yield event.delta

    def tools(self) -> str:
        tool = {"type": "function", **s.TOOL["function"], "strict": False}
        items: Any = s.TOOLS_QUESTION
        previous = None
        while True:
            answer = self.ask(self.scripted, "", input=items, tools=[tool], previous_response_id=previous)
            calls = [item for item in answer.output if item.type == "function_call"]
            if not calls:
                return answer.output_text
            previous = answer.id
            items = [
                {
                    "type": "function_call_output",
                    "call_id": call.call_id,
                    "output": self.asked.weather(**json.loads(call.arguments)),
                }
                for call in calls
            ]

    def schema(self) -> dict[str, Any]:
        asked = {"type": "json_schema", "name": "report", "schema": s.REPORT_SCHEMA, "strict": True}
        return json.loads(self.ask(self.tiny, s.REPORT_QUESTION, text={"format": asked}).output_text)


APIS = {"chat": Chat, "responses": Responses}

if __name__ == "__main__":
    s.main(lambda tiny, scripted, asked, api: APIS[api](tiny, scripted, asked))
