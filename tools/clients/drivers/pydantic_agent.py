"""Pydantic AI, whose agent goes round the tool loop; structured output through a tool that must be called."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pydantic
import scenarios as s
from pydantic_ai import Agent, ModelHTTPError
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class Report(pydantic.BaseModel):
    """What the weather is."""

    city: s.City
    degrees: int = pydantic.Field(ge=-90, le=60)


class PydanticAI:
    def __init__(self, tiny: str, scripted: str, asked: s.Asked) -> None:
        self.tiny, self.scripted = (
            OpenAIChatModel(s.MODEL, provider=OpenAIProvider(base_url=f"{url}/v1", api_key=s.KEY))
            for url in (tiny, scripted)
        )
        self.asked = asked

    def plain(self) -> str:
        return Agent(self.tiny).run_sync(s.QUESTION).output

    def stream(self) -> Iterator[str]:
        return iter(asyncio.run(self.pieces(self.tiny, s.QUESTION)))

    async def pieces(self, model: OpenAIChatModel, question: str, most: int | None = None) -> list[str]:
        pieces: list[str] = []
        async with Agent(model).run_stream(question) as result:
            async for piece in result.stream_text(delta=True, debounce_by=None):
                pieces.append(piece)
                if len(pieces) == most:
                    break
        return pieces

    def tools(self) -> str:
        def get_weather(city: str) -> str:
            """Get the current weather of a city."""
            return self.asked.weather(city)

        return Agent(self.scripted, tools=[get_weather]).run_sync(s.TOOLS_QUESTION).output

    def schema(self) -> dict[str, Any]:
        return Agent(self.tiny, output_type=Report).run_sync(s.REPORT_QUESTION).output.model_dump()

    def error(self) -> Exception:
        settings = {"temperature": s.BAD_TEMPERATURE}
        raised = s.catch(ModelHTTPError, lambda: Agent(self.tiny).run_sync(s.QUESTION, model_settings=settings))
        s.require(raised.status_code == 400, raised)
        return raised

    def abort(self) -> None:
        asyncio.run(self.pieces(self.scripted, s.ABORT_QUESTION, most=1))


if __name__ == "__main__":
    s.main(PydanticAI)
