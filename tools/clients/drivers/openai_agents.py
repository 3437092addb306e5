"""OpenAI's Agents SDK, whose runner goes round the tool loop; on responses, as it does by itself."""

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import scenarios as s
from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled


class Report(pydantic.BaseModel):
    """What the weather is."""

    city: s.City
    degrees: int = pydantic.Field(ge=-90, le=60)


class Agents:
    def __init__(self, tiny: str, scripted: str, asked: s.Asked) -> None:
        set_tracing_disabled(disabled=True)
        self.tiny, self.scripted = (self.model(url) for url in (tiny, scripted))
        self.asked = asked
        self.loop = asyncio.Runner()  # one for all: its clients keep their connections

    @staticmethod
    def model(url: str) -> OpenAIResponsesModel:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=s.KEY, timeout=s.TIMEOUT_S)
        return OpenAIResponsesModel(model=s.MODEL, openai_client=client)

    def run(self, model: OpenAIResponsesModel, question: str, **fields: Any) -> Any:
        return self.loop.run(Runner.run(Agent(name="helper", model=model, **fields), question)).final_output

    def plain(self) -> str:
        return self.run(self.tiny, s.QUESTION)

    def stream(self) -> Iterator[str]:
        return iter(self.loop.run(self.pieces(self.tiny, s.QUESTION)))

    async def pieces(self, model: OpenAIResponsesModel, question: str, most: int | None = None) -> list[str]:
        result = Runner.run_streamed(Agent(name="helper", model=model), question)
        pieces: list[str] = []
        async for event in result.stream_events():
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                pieces.append(event.data.delta)
                if len(pieces) == most:
                    result.cancel()
        return pieces

    def tools(self) -> str:
        @function_tool
        def get_weather(city: str) -> str:
            """Get the current weather of a city."""
            return self.asked.weather(city)

        return self.run(self.scripted, s.TOOLS_QUESTION, tools=[get_weather])

    def schema(self) -> dict[str, Any]:
        return self.run(self.tiny, s.REPORT_QUESTION, output_type=Report).model_dump()

    def error(self) -> Exception:
        settings = ModelSettings(temperature=s.BAD_TEMPERATURE)
        return s.catch(openai.BadRequestError, lambda: self.run(self.tiny, s.QUESTION, model_settings=settings))

    def abort(self) -> None:
        self.loop.run(self.pieces(self.scripted, s.ABORT_QUESTION, most=1))


if __name__ == "__main__":
    s.main(Agents)
