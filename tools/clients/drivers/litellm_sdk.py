"""LiteLLM, as its SDK."""

import asyncio
import json
import os
from collections.abc import Iterator
from typing import Any

import scenarios as s

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it looks for prices on the internet when it is imported

import litellm


class LiteLLM:
    def __init__(self, tiny: str, scripted: str, asked: s.Asked) -> None:
        self.tiny, self.scripted, self.asked = tiny, scripted, asked

    @staticmethod
    def where(url: str) -> dict[str, Any]:
        return {
            "model": f"hosted_vllm/{s.MODEL}",
            "api_base": f"{url}/v1",
            "api_key": s.KEY,
            "timeout": s.TIMEOUT_S,
        }

    def ask(self, url: str, turns: list[Any], **fields: Any) -> Any:
        return litellm.completion(messages=turns, **self.where(url), **fields)

    def plain(self) -> str:
        return self.ask(self.tiny, s.turns(s.QUESTION)).choices[0].message.content

    def stream(self) -> Iterator[str]:
        for chunk in self.ask(self.tiny, s.turns(s.QUESTION), stream=True, stream_options={"include_usage": True}):
            yield from (choice.delta.content for choice in chunk.choices)

    def tools(self) -> str:
        turns: list[Any] = s.turns(s.TOOLS_QUESTION)
        while True:
            message = self.ask(self.scripted, turns, tools=[s.TOOL]).choices[0].message
            if not message.tool_calls:
                return message.content
            turns.append(message)
            for call in message.tool_calls:
                result = self.asked.weather(**json.loads(call.function.arguments))
                turns.append({"role": "tool", "tool_call_id": call.id, "name": call.function.name, "content": result})

    def schema(self) -> dict[str, Any]:
        schema = {"type": "json_schema", "json_schema": {"name": "report", "schema": s.REPORT_SCHEMA, "strict": True}}
        answer = self.ask(self.tiny, s.turns(s.REPORT_QUESTION), response_format=schema)
        return json.loads(answer.choices[0].message.content)

    def error(self) -> Exception:
        asked = s.turns(s.QUESTION)
        return s.catch(litellm.BadRequestError, lambda: self.ask(self.tiny, asked, temperature=s.BAD_TEMPERATURE))

    def abort(self) -> None:
        asyncio.run(self.leave())

    async def leave(self) -> None:
        where = self.where(self.scripted)
        stream = await litellm.acompletion(messages=s.turns(s.ABORT_QUESTION), stream=True, **where)
        await anext(aiter(stream))
        await stream.aclose()  # of the two kinds of stream only this one can be closed


if __name__ == "__main__":
    s.main(LiteLLM)
