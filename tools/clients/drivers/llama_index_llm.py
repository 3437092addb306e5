"""LlamaIndex' `OpenAILike`, and its agent's tool loop."""

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import scenarios as s
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike


class Report(pydantic.BaseModel):
    """What the weather is."""

    city: s.City
    degrees: int = pydantic.Field(ge=-90, le=60)


class LlamaIndex:
    def __init__(self, tiny: str, scripted: str, asked: s.Asked) -> None:
        self.tiny, self.scripted = (self.model(url) for url in (tiny, scripted))
        self.asked = asked

    @staticmethod
    def model(url: str, **fields: Any) -> OpenAILike:
        return OpenAILike(
            model=s.MODEL,
            api_base=f"{url}/v1",
            api_key=s.KEY,
            timeout=s.TIMEOUT_S,
            max_retries=0,
            is_chat_model=True,
            is_function_calling_model=True,
            should_use_structured_outputs=True,
            **fields,
        )

    def plain(self) -> str:
        return self.tiny.chat([ChatMessage(s.QUESTION)]).message.content

    def stream(self) -> Iterator[str]:
        for each in self.tiny.stream_chat([ChatMessage(s.QUESTION)]):
            yield each.delta

    def tools(self) -> str:
        def get_weather(city: str) -> str:
            """Get the current weather of a city."""
            return self.asked.weather(city)

        async def run() -> str:
            agent = FunctionAgent(tools=[get_weather], llm=self.scripted)
            return str(await agent.run(s.TOOLS_QUESTION))

        return asyncio.run(run())

    def schema(self) -> dict[str, Any]:
        answer = self.tiny.as_structured_llm(Report).chat([ChatMessage(s.REPORT_QUESTION)])
        return answer.raw.model_dump()

    def error(self) -> Exception:
        turns = [ChatMessage(s.QUESTION)]
        return s.catch(openai.BadRequestError, lambda: self.tiny.chat(turns, temperature=s.BAD_TEMPERATURE))

    def abort(self) -> None:
        pieces = self.scripted.stream_chat([ChatMessage(s.ABORT_QUESTION)])
        next(pieces)
        pieces.close()


if __name__ == "__main__":
    s.main(LlamaIndex)
