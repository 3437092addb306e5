"""An HTTP client that does little per token: one protocol object per connection, server-sent events split by line.

Connections are kept and used again. A request fails unless the server answers 200, ends its stream with a finish,
and counts as many tokens as were asked for.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, cast

import httptools
import msgspec
import numpy as np

from openinfer_bench.serve.messages import Job, Outcome, ScoredToken, Target

DEADLINE_S = 600.0
_SHOWN_ERROR = 200


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Logprobs(msgspec.Struct):
    tokens: list[str] = []
    token_logprobs: list[float] = []
    top_logprobs: list[dict[str, float] | None] | None = None


class _Choice(msgspec.Struct):
    text: str = ""
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None


class _Event(msgspec.Struct):
    """The parts of a chunk that are looked at."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


async def connect_by_tcp(protocol: Callable[[], "Connection"], target: Target) -> "Connection":
    """A new connection to a server."""
    _, connection = await asyncio.get_running_loop().create_connection(protocol, target.host, target.port)
    return connection


Connect = Callable[[Callable[[], "Connection"], Target], Awaitable["Connection"]]


class Client:
    """Requests to one server.

    Args:
        target: the server.
        connect: opens a connection to it.
    """

    def __init__(self, target: Target, *, connect: Connect = connect_by_tcp) -> None:
        self._target = target
        self._connect = connect
        self._idle: deque[Connection] = deque()

    async def run(self, job: Job) -> Outcome:
        """Sends a request and follows it to its end; never raises for what the server or the network do."""
        request = _encode(self._target, job)
        outcome = Outcome(begin_s=time.perf_counter())
        try:
            async with asyncio.timeout(DEADLINE_S):
                connection = await self._connection()
                outcome.begin_s = time.perf_counter()
                await connection.exchange(request, abort_after=job.abort_after)
        except TimeoutError:
            outcome.error = f"no end within {DEADLINE_S:g} s"
            return outcome
        except OSError as error:
            outcome.error = repr(error)[:_SHOWN_ERROR]
            return outcome
        _judge(outcome, connection, job)
        if connection.reusable:
            self._idle.append(connection)
        else:
            connection.close()
        return outcome

    def close(self) -> None:
        """Drops the kept connections."""
        while self._idle:
            self._idle.pop().close()

    async def _connection(self) -> "Connection":
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                return connection
        return await self._connect(Connection, self._target)


def _judge(outcome: Outcome, connection: "Connection", job: Job) -> None:
    outcome.times = np.asarray(connection.times, np.float64).tobytes()
    usage = connection.usage
    outcome.tokens = len(connection.times) if usage is None else usage.completion_tokens
    if usage is not None and usage.prompt_tokens_details is not None:
        cached_tokens = usage.prompt_tokens_details.cached_tokens
        outcome.cached_tokens, outcome.tells_cached = cached_tokens or 0, cached_tokens is not None
    outcome.token_ids, outcome.scored = connection.token_ids, connection.scored
    outcome.aborted = connection.aborted
    if outcome.aborted:
        return
    if connection.failure:
        outcome.error = connection.failure[:_SHOWN_ERROR]
    elif not connection.times:
        outcome.error = "no tokens"
    elif outcome.tokens != job.output_tokens:
        outcome.error = f"{outcome.tokens} tokens came, {job.output_tokens} were asked for"


def _encode(target: Target, job: Job) -> bytes:
    fields = {
        "model": target.model,
        "prompt": job.prompt_ids,
        "max_tokens": job.output_tokens,
        "temperature": 0.0,
        "stream": True,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    if job.cache_salt is not None:
        fields["cache_salt"] = job.cache_salt
    if job.top_logprobs is not None:
        fields |= {"logprobs": job.top_logprobs, "return_token_ids": True}
    body = msgspec.json.encode(fields)
    headers = {"host": f"{target.host}:{target.port}", "content-type": "application/json", **target.headers}
    lines = [f"POST {target.path}/v1/completions HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, f"content-length: {len(body)}", "", ""]).encode() + body


def _scored(shown: _Logprobs) -> list[ScoredToken]:
    """Raises `ValueError` where one of its lists is shorter than another."""
    top = [each or {} for each in shown.top_logprobs or [None] * len(shown.tokens)]
    return [ScoredToken(*each) for each in zip(shown.tokens, shown.token_logprobs, top, strict=True)]


class Connection(asyncio.Protocol):
    """One connection and the exchange on it."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.usage: _Usage | None = None
        self.token_ids: list[int] = []
        self.scored: list[ScoredToken] = []
        self.aborted = False
        self.failure = ""
        self.reusable = False
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[None] | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._now_s = 0.0
        self._rest = b""
        self._abort_after: int | None = None
        self._ended = False
        self._refused = False

    async def exchange(self, request: bytes, *, abort_after: int | None) -> None:
        """Sends a request and returns at the end of its answer, of the connection, or when the client leaves."""
        self.times, self.usage, self.failure = [], None, ""
        self.token_ids, self.scored = [], []
        self._rest, self._ended, self._refused, self._abort_after = b"", False, False, abort_after
        self.reusable = False
        self._done = asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)
        if self._transport is None or self._transport.is_closing():
            self.failure = "the connection is closed"
            return
        self._transport.write(request)
        await self._done

    def close(self) -> None:
        """Ends the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    # --- asyncio ----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        self._now_s = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(f"not HTTP: {error!r}")

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        self._end(f"the connection ended early: {exc!r}")

    # --- httptools --------------------------------------------------------------------------------------

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        self._refused = status != 200
        if self._refused:
            self.failure = f"HTTP {status}: "

    def on_body(self, body: bytes) -> None:
        if self._refused:
            self.failure += body.decode(errors="replace")
            return
        *lines, self._rest = (self._rest + body).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and not self.aborted and not self.failure:
                self._take(line[5:].strip())

    def on_message_complete(self) -> None:
        if self.aborted:
            return
        self.reusable = self._parser.should_keep_alive()
        self._end("" if self._ended or self.failure else "the stream has no end")

    # --- ours -------------------------------------------------------------------------------------------

    def _take(self, data: bytes) -> None:
        if data == b"[DONE]":
            self._ended = True
            return
        try:
            event = _decode(data)
            scored = [score for choice in event.choices if choice.logprobs for score in _scored(choice.logprobs)]
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            self.failure = f"an event is no completion's: {error}"
            return
        if event.error is not None:
            self.failure = str(event.error)
        if event.usage is not None:
            self.usage = event.usage
        for choice in event.choices:
            self.token_ids += choice.token_ids or ()
        self.scored += scored
        if any(choice.text or choice.finish_reason is None for choice in event.choices):
            self.times.append(self._now_s)  # a bare finish is no token's
            if len(self.times) == self._abort_after:
                self.aborted = True
                self.close()
                self._end("")

    def _end(self, failure: str) -> None:
        if self._done is not None and not self._done.done():
            self.failure = self.failure or failure
            self._done.set_result(None)
