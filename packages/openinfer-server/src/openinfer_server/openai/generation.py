"""A completion or a chat on its way to its response: the plain path, or a sink per choice."""

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from openinfer_server.http.api_errors import ApiError
from openinfer_server.http.request import HttpRequest
from openinfer_server.http.writers import StreamWriter
from openinfer_server.openai.event_frames import DONE, FrameMaker, ResponseHead, error_event
from openinfer_server.openai.event_stream import EventStream
from openinfer_server.openai.objects import RenderedPrompt, Usage
from openinfer_server.openai.plain_stream import PlainStream
from openinfer_server.output.delta_choice import Sink
from openinfer_server.output.parsing import OutputParsers
from openinfer_server.output.pipeline import deliver, submit
from openinfer_server.output.response import Response
from openinfer_server.output.usage import usage_of
from openinfer_server.output.without_reasoning import WithoutReasoning
from openinfer_server.request.plan import Plan, Prompt, StreamUsage
from openinfer_server.service import Service
from openinfer_server.text.byte_table import ByteTable


def rendered_prompt(id_prefix: str, model: str, prompt: Prompt) -> RenderedPrompt:
    return RenderedPrompt(request_id=_new_id(id_prefix), model=model, token_ids=prompt.token_ids)


def _new_id(prefix: str) -> str:
    return f"{prefix}-{secrets.token_hex(12)}"


@dataclass(frozen=True, slots=True)
class ResponseShape:
    """What tells the responses of one route from those of another."""

    id_prefix: str
    event_object: str
    frame: FrameMaker  # of events that are text and nothing else
    # Makes what writes the events of the choice with this index.
    stream_sink: Callable[[ResponseHead, int, EventStream], Sink]
    whole_sink: Callable[[], Sink]  # makes what keeps a choice for one body
    # Makes the whole response of the choices and their whole sinks.
    body: Callable[["Generation", ResponseHead, Sequence[Any], Sequence[Any], Usage], msgspec.Struct]


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One request of a client, checked, on its way to its response."""

    service: Service
    shape: ResponseShape
    plan: Plan
    model: str
    stream: bool
    usage: StreamUsage
    echo: bool = False
    tells_token_ids: bool = False
    parsers: OutputParsers | None = None  # None where all text is content
    hides_reasoning: bool = False

    async def deliver(self, http_request: HttpRequest) -> None:
        """Submits all choices and sends their response."""
        head = ResponseHead(
            id=_new_id(self.shape.id_prefix),
            object=self.shape.event_object,
            created=int(time.time()),
            model=self.model,
            usage=self.usage,
            tells_token_ids=self.tells_token_ids,
            may_call=self.parsers is not None and self.parsers.may_call,
        )
        plan, response = self.plan, Response(self.service.link, named_stop_ids=self.plan.named_stop_ids)
        sinks: list[Sink] = []
        writer = http_request.stream(len(plan.requests)) if self.stream else None
        table = self._plain_table()

        def usage() -> Usage:
            return usage_of(response.choices, plan.n, has_prediction=plan.has_prediction)

        if writer is not None and table is not None:
            await self._submit_plain(response, head, writer, table)
        else:
            sinks += self._sinks(response, head, writer, usage)
            shown = list(map(WithoutReasoning, sinks)) if self.hides_reasoning else sinks
            await submit(
                self.service,
                response,
                plan,
                shown,
                parsers=self.parsers,
                echo=self.echo,
                tells_token_ids=self.tells_token_ids,
            )

        def body() -> bytes:
            return msgspec.json.encode(self.shape.body(self, head, response.choices, sinks, usage()))

        def end(error: ApiError | None) -> bytes:
            if error is not None:
                return error_event(error) + DONE
            return (head.usage_event(usage()) if self.usage.last else b"") + DONE

        await deliver(http_request, self.service, response, writer, body=body, end=end)

    def _sinks(
        self, response: Response, head: ResponseHead, writer: StreamWriter | None, usage: Callable[[], Usage]
    ) -> list[Sink]:
        indices = range(len(self.plan.requests))
        if writer is None:
            return [self.shape.whole_sink() for _ in indices]
        events = EventStream(writer, response.link.dirty, usage if self.usage.every else None)
        return [self.shape.stream_sink(head, index, events) for index in indices]

    async def _submit_plain(
        self, response: Response, head: ResponseHead, writer: StreamWriter, table: ByteTable
    ) -> None:
        prompts = [self.plan.prompt_of(index) for index in range(len(self.plan.requests))]
        choices = [
            PlainStream(
                response,
                index,
                prompt_tokens=len(prompt.token_ids),
                echo=prompt.text if self.echo else "",
                table=table,
                frame=self.shape.frame(head, index),
                writer=writer,
            )
            for index, prompt in enumerate(prompts)
        ]
        await response.submit(choices, self.plan.requests)

    def _plain_table(self) -> ByteTable | None:
        plan = self.plan
        scored = plan.scoring.output is not None or plan.scoring.of_prompt is not None
        shows_tokens = self.tells_token_ids or plan.shows_stop or scored or self.usage.every
        plain = self.parsers is None and not plan.stops and not shows_tokens
        return self.service.tokenizer.byte_table if plain else None
