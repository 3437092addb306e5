"""Instructor: structured answers through a function that must be called, streamed as partial objects."""

from collections.abc import Iterator
from typing import Any

import instructor
import openai
import pydantic
import scenarios as s
from instructor.core.exceptions import InstructorRetryException


class Report(pydantic.BaseModel):
    """What the weather is."""

    city: s.City
    degrees: int = pydantic.Field(ge=-90, le=60)


class Instructor:
    def __init__(self, tiny: str, scripted: str, asked: s.Asked) -> None:
        clients = [openai.OpenAI(base_url=f"{url}/v1", api_key=s.KEY, timeout=s.TIMEOUT_S) for url in (tiny, scripted)]
        self.tiny, self.scripted = (instructor.from_openai(each, mode=instructor.Mode.TOOLS) for each in clients)
        self.json = instructor.from_openai(clients[0], mode=instructor.Mode.JSON_SCHEMA)
        self.asked = asked

    def ask(self, client: Any, question: str, **fields: Any) -> Any:
        fields = {"response_model": Report, "max_retries": 0, **fields}
        return client.chat.completions.create(model=s.MODEL, messages=s.turns(question), **fields)

    def plain(self) -> str:
        return self.ask(self.tiny, s.QUESTION, response_model=None).choices[0].message.content

    def stream(self) -> Iterator[str]:
        stream = self.json.chat.completions.create_partial(
            model=s.MODEL, messages=s.turns(s.REPORT_QUESTION), response_model=Report
        )
        for report in stream:
            yield str(report)

    def schema(self) -> dict[str, Any]:
        return self.ask(self.tiny, s.REPORT_QUESTION).model_dump()

    def error(self) -> Exception:
        return s.catch(
            (openai.BadRequestError, InstructorRetryException),
            lambda: self.ask(self.tiny, s.QUESTION, temperature=s.BAD_TEMPERATURE),
        )

    def abort(self) -> None:
        stream = self.ask(self.scripted, s.ABORT_QUESTION, response_model=None, stream=True)
        next(iter(stream))
        stream.close()


if __name__ == "__main__":
    s.main(Instructor)
