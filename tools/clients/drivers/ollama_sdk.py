"""Ollama's Python client; it has no loop for tools of its own."""

import json
from collections.abc import Iterator
from typing import Any

import ollama
import scenarios as s


class Ollama:
    def __init__(self, tiny: str, scripted: str, asked: s.Asked) -> None:
        self.tiny, self.scripted = (ollama.Client(host=url, timeout=s.TIMEOUT_S) for url in (tiny, scripted))
        self.asked = asked

    def plain(self) -> str:
        return self.tiny.chat(s.MODEL, s.turns(s.QUESTION)).message.content or ""

    def stream(self) -> Iterator[str]:
        for piece in self.tiny.chat(s.MODEL, s.turns(s.QUESTION), stream=True):
            yield piece.message.content or ""

    def tools(self) -> str:
        def get_weather(city: str) -> str:
            """Get the current weather of a city.

            Args:
                city: Name of the city.
            """
            return self.asked.weather(city)

        turns = s.turns(s.TOOLS_QUESTION)
        while True:
            message = self.scripted.chat(s.MODEL, turns, tools=[get_weather]).message
            turns.append(message)
            if not message.tool_calls:
                return message.content or ""
            for call in message.tool_calls:
                result = get_weather(**call.function.arguments)
                turns.append({"role": "tool", "tool_name": call.function.name, "content": result})

    def schema(self) -> dict[str, Any]:
        answer = self.tiny.chat(s.MODEL, s.turns(s.REPORT_QUESTION), format=s.REPORT_SCHEMA)
        return json.loads(answer.message.content or "")

    def error(self) -> Exception:
        options = {"temperature": s.BAD_TEMPERATURE}
        raised = s.catch(ollama.ResponseError, lambda: self.tiny.chat(s.MODEL, s.turns(s.QUESTION), options=options))
        s.require(getattr(raised, "status_code", 0) == 400, raised)
        return raised

    def abort(self) -> None:
        stream = self.scripted.chat(s.MODEL, s.turns(s.ABORT_QUESTION), stream=True)
        next(piece for piece in stream if piece.message.content)
        stream.close()


if __name__ == "__main__":
    s.main(Ollama)
