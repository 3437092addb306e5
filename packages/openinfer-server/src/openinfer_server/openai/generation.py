"""From a checked plan to a delivered answer: what `/v1/completions` and `/v1/chat/completions` have in common."""

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
from openinfer_server.openai.objects import Usage
from openinfer_server.output.delivery import send_stream, send_whole
from openinfer_server.output.logprobs import LogprobFormat
from openinfer_server.output.plain_stream import PlainStream
from openinfer_server.output.response import Choice, Response
from openinfer_server.output.text_choices import CollectedText, StreamedText, TextOptions
from openinfer_server.output.usage import usage_of
from openinfer_server.request.plan import Plan
from openinfer_server.service import Service
from openinfer_server.text.byte_table import ByteTable


@dataclass(frozen=True, slots=True)
class ResponseShape:
    """What tells the answers of one route from those of another."""

    id_prefix: str
    event_object: str
    frame: FrameMaker
    logprob_format: LogprobFormat
    body: Callable[[ResponseHead, Sequence[Any], Usage], msgspec.Struct]
    """Makes the whole answer of the choices that its `Generation` makes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One request of a client, checked, on its way to its answer."""

    service: Service
    shape: ResponseShape
    plan: Plan
    model: str
    stream: bool
    include_usage: bool
    echo: bool

    async def deliver(self, http_request: HttpRequest) -> None:
        """Submits all choices and sends their answer.

        Raises:
            ApiError: it failed before the response began.
            ClientDisconnected: the client left.
        """
        head = ResponseHead(
            id=f"{self.shape.id_prefix}-{secrets.token_hex(12)}",
            object=self.shape.event_object,
            created=int(time.time()),
            model=self.model,
            include_usage=self.include_usage,
        )
        if self.stream:
            await self._deliver_stream(http_request, head)
        else:
            await self._deliver_whole(http_request, head)

    async def _deliver_stream(self, http_request: HttpRequest, head: ResponseHead) -> None:
        indices = range(len(self.plan.requests))
        response, writer = Response(self.service.link), http_request.stream(len(indices))
        response.submit([self.stream_choice(response, head, writer, index) for index in indices], self.plan.requests)

        def end(error: ApiError | None) -> bytes:
            if error is not None:
                return error_event(error) + DONE
            return (head.usage_event(usage_of(response.choices, self.plan.n)) if self.include_usage else b"") + DONE

        try:
            await send_stream(http_request, response, writer, end)
        finally:
            self.service.metrics.slow_clients.value += writer.was_slow

    async def _deliver_whole(self, http_request: HttpRequest, head: ResponseHead) -> None:
        response = Response(self.service.link)
        choices = [self.whole_choice(response, index) for index in range(len(self.plan.requests))]
        response.submit(choices, self.plan.requests)
        await send_whole(
            http_request,
            response,
            lambda: msgspec.json.encode(self.shape.body(head, choices, usage_of(choices, self.plan.n))),
        )

    def whole_choice(self, response: Response, index: int) -> Choice:
        """A choice that is kept for one body."""
        return CollectedText(response, index, prompt=self.plan.prompt_of(index), options=self.text_options())

    def stream_choice(self, response: Response, head: ResponseHead, writer: StreamWriter, index: int) -> Choice:
        """A choice that is written as it comes."""
        frame = self.shape.frame(head, index)
        prompt = self.plan.prompt_of(index)
        table = self._plain_table()
        if table is not None:
            echo = prompt.text if self.echo else ""
            num_prompt_tokens = len(prompt.token_ids)
            return PlainStream(
                response, index, prompt_tokens=num_prompt_tokens, echo=echo, table=table, frame=frame, writer=writer
            )
        return StreamedText(
            response,
            index,
            prompt=prompt,
            options=self.text_options(),
            frame=frame,
            writer=writer,
            logprob_format=self.shape.logprob_format,
        )

    def _plain_table(self) -> ByteTable | None:
        """The byte table if the plain path serves this request."""
        scoring = self.plan.scoring
        plain = not self.plan.stops and scoring.output is None and scoring.prompt is None
        return self.service.tokenizer.byte_table if plain else None

    def text_options(self, visible_tokens: frozenset[str] = frozenset()) -> TextOptions:
        """What is wanted of the choices' text."""
        return TextOptions(
            tokenizer=self.service.tokenizer,
            stops=self.plan.stops,
            min_tokens=self.plan.min_tokens,
            echo=self.echo,
            visible_tokens=visible_tokens,
        )
