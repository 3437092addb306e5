"""Anthropic's SDK, its tool runner included."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import scenarios as s


class Messages:
    def __init__(self, tiny: str, scripted: str, asked: s.Asked) -> None:
        self.tiny, self.scripted = (
            anthropic.Anthropic(base_url=url, api_key=s.KEY, timeout=s.TIMEOUT_S) for url in (tiny, scripted)
        )
        self.asked = asked

    def fields(self, question: str, **fields: Any) -> dict[str, Any]:
        return {"model": s.MODEL, "max_tokens": s.MAX_TOKENS, "messages": s.turns(question), **fields}

    def plain(self) -> str:
        return self.tiny.messages.create(**self.fields(s.QUESTION)).content[0].text

    def stream(self) -> Iterator[str]:
        with self.tiny.messages.stream(**self.fields(s.QUESTION)) as stream:
            yield from stream.text_stream

    def tools(self) -> str:
        @anthropic.beta_tool
        def get_weather(city: str) -> str:
            """Get the current weather of a city.

            Args:
                city: Name of the city.
            """
            return self.asked.weather(city)

        runner = self.scripted.beta.messages.tool_runner(tools=[get_weather], **self.fields(s.TOOLS_QUESTION))
        return runner.until_done().content[-1].text

    def schema(self) -> dict[str, Any]:
        asked = {"format": {"type": "json_schema", "schema": s.REPORT_SCHEMA}}
        message = self.tiny.messages.create(**self.fields(s.REPORT_QUESTION, output_config=asked))
        return json.loads(message.content[-1].text)

    def error(self) -> Exception:
        fields = self.fields(s.QUESTION, extra_body={"temperature": s.BAD_TEMPERATURE})
        return s.catch(anthropic.BadRequestError, lambda: self.tiny.messages.create(**fields))

    def abort(self) -> None:
        with self.scripted.messages.stream(**self.fields(s.ABORT_QUESTION, max_tokens=200_000)) as stream:
            next(iter(stream.text_stream))


if __name__ == "__main__":
    s.main(Messages)
