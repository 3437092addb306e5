"""LangChain's `ChatOpenAI`."""

from collections.abc import Iterator
from typing import Any

import openai
import scenarios as s
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


class LangChain:
    def __init__(self, tiny: str, scripted: str, asked: s.Asked) -> None:
        self.tiny, self.scripted = (
            ChatOpenAI(model=s.MODEL, base_url=f"{url}/v1", api_key=s.KEY, timeout=s.TIMEOUT_S)
            for url in (tiny, scripted)
        )
        self.asked = asked

    def plain(self) -> str:
        return self.tiny.invoke(s.QUESTION).text

    def stream(self) -> Iterator[str]:
        for chunk in self.tiny.stream(s.QUESTION):
            yield chunk.text

    def tools(self) -> str:
        @tool
        def get_weather(city: str) -> str:
            """Get the current weather of a city."""
            return self.asked.weather(city)

        model = self.scripted.bind_tools([get_weather])
        turns: list[Any] = [HumanMessage(s.TOOLS_QUESTION)]
        while (answer := model.invoke(turns)).tool_calls:
            results = [
                ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"]) for call in answer.tool_calls
            ]
            turns += [answer, *results]
        return answer.text

    def schema(self) -> dict[str, Any]:
        asked = {"title": "report", "description": "A report of the weather.", **s.REPORT_SCHEMA}
        model = self.tiny.with_structured_output(asked, method="json_schema", strict=True)
        return model.invoke(s.REPORT_QUESTION)

    def error(self) -> Exception:
        return s.catch(openai.BadRequestError, lambda: self.tiny.invoke(s.QUESTION, temperature=s.BAD_TEMPERATURE))

    def abort(self) -> None:
        pieces = self.scripted.stream(s.ABORT_QUESTION)
        next(pieces)
        pieces.close()


if __name__ == "__main__":
    s.main(LangChain)
