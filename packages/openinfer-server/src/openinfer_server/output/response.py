"""`Choice`: one engine request of a client's request; `Response`: all of them together.

    Response.submit(choice, request) ─► EngineLink ─► engine
    engine ─► EngineLink ─► Choice.tokens / finished / failed ─► Response ─► `began`, `done` ─► the request's coroutine

Prompts x `n` make the choices. The first failure ends the whole response: the other choices are aborted. All of this
runs in the event loop's thread.
"""

import asyncio
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from contextvars import ContextVar
from typing import Any, Protocol

import msgspec

from openinfer_core.events import Failed, FailureKind, Finished, FinishReason, Scheduled, Tokens
from openinfer_core.request import GenerateRequest, RequestId
from openinfer_server.http.writers import StreamWriter
from openinfer_server.limits.loop_turns import LoopTurns, Slices

# the choices that the HTTP request of this task has submitted, for the line that the log has of it
choices_of_request: ContextVar["list[Choice] | None"] = ContextVar("choices_of_request", default=None)


class EngineRequests(Protocol):
    """What a response asks of the link to the engine; `EngineLink` is it."""

    dirty: list[StreamWriter]

    turns: LoopTurns

    def new_id(self) -> RequestId: ...

    def enter(self, choices: "Sequence[Choice]", requests: Sequence[GenerateRequest]) -> None: ...

    def submit(self, choice: "Choice", request: GenerateRequest) -> None: ...

    def replace(self, choice: "Choice", request: GenerateRequest) -> None: ...

    def abort(self, choice: "Choice") -> None: ...

    def stopped(self, choice: "Choice") -> None: ...

    def unread(self, num_tokens: int) -> None: ...


class Choice:
    """One engine request.

    Attributes:
        index: its place among the choices of the response.
        request_id: known from `Response.submit` on.
        submitted_s: clock of the submission.
        queued_s: how long it waited in the engine's queue; None while it does.
        first_token_s: clock of the first token; 0 before it.
        last_token_s: clock of the last token; 0 before the first.
        completion_tokens: sampled tokens, the stop token included; before the end, as far as a subclass counts them.
        reasoning_tokens: those of them that were spent on reasoning, as far as a parser told.
        accepted_drafts: tokens that the engine drafted before it sampled them; 0 before the end.
        rejected_drafts: drafts that it computed in vain; 0 before the end.
        finish_reason: None until it has ended well.
        stop_token_id: the stop token that ended it.
        transfer: where its prompt's KV was left for another engine, if that was asked.
    """

    __slots__ = (
        "accepted_drafts",
        "cached_tokens",
        "completion_tokens",
        "finish_reason",
        "first_token_s",
        "index",
        "last_token_s",
        "prompt_tokens",
        "queued_s",
        "reasoning_tokens",
        "rejected_drafts",
        "request_id",
        "response",
        "stop_token_id",
        "submitted_s",
        "transfer",
    )

    def __init__(self, response: "Response", index: int, *, prompt_tokens: int) -> None:
        self.response = response
        self.index = index
        self.prompt_tokens = prompt_tokens
        self.request_id = RequestId(-1)
        self.submitted_s = 0.0
        self.queued_s: float | None = None
        self.first_token_s = 0.0
        self.last_token_s = 0.0
        self.cached_tokens = 0
        self.completion_tokens: int = 0
        self.reasoning_tokens: int = 0
        self.accepted_drafts = self.rejected_drafts = 0
        self.finish_reason: FinishReason | None = None
        self.stop_token_id: int | None = None
        self.transfer: dict[str, Any] | None = None

    @property
    def stop_reason(self) -> str | int | None:
        """What of the request's own stops ended it; None if the model or a limit did."""
        return self.stop_token_id if self.stop_token_id in self.response.named_stop_ids else None

    def scheduled(self, event: Scheduled) -> None:
        self.cached_tokens = event.cached_tokens
        self.response.begin()

    def tokens(self, event: Tokens) -> None:
        raise NotImplementedError

    def finished(self, event: Finished) -> None:
        self.completion_tokens = event.completion_tokens
        self.cached_tokens = event.cached_tokens
        self.accepted_drafts += event.accepted_drafts
        self.rejected_drafts += event.rejected_drafts
        self.stop_token_id = event.stop_token_id
        self.transfer = event.transfer
        if event.reason is FinishReason.ABORT:  # not by us: then the link would have forgotten the choice
            self.response.fail(Failed(self.request_id, FailureKind.SHUTDOWN, "the engine aborted the request"))
        else:
            self.conclude(event.reason)

    def conclude(self, reason: FinishReason) -> None:
        """Ends it well; subclasses say so to the client first."""
        self.finish_reason = reason
        self.response.choice_ended()


class Response:
    """All choices of one client's request.

    Args:
        named_stop_ids: stop tokens that are told to the client as what ended a choice.

    Attributes:
        began: resolved when the engine works on any choice, or with `done`.
        done: resolved when every choice has ended, or one failed.
        failure: why, if one failed.
    """

    def __init__(self, link: EngineRequests, *, named_stop_ids: AbstractSet[int] = frozenset()) -> None:
        loop = asyncio.get_running_loop()
        self.began: asyncio.Future[None] = loop.create_future()
        self.done: asyncio.Future[None] = loop.create_future()
        self.failure: Failed | None = None
        self.choices: list[Choice] = []
        self.link = link
        self.named_stop_ids = named_stop_ids
        self._open = 0

    async def submit(self, choices: Sequence[Choice], requests: Sequence[GenerateRequest]) -> None:
        """Hands all requests to the engine, many of them in slices, so that streams have their turn.

        Raises:
            ApiError: 429 or 503; the queue has no room for them. None was handed over.
        """
        self.choices = list(choices)
        self._open = len(self.choices)
        self.link.enter(self.choices, requests)
        slices = Slices(self.link.turns)
        try:
            for choice, request in zip(self.choices, requests, strict=True):
                await slices.before(num_tokens=len(request.prompt_token_ids))
                if self.done.done():  # one of them has failed, and with it all
                    break
                self.link.submit(choice, request)
        except BaseException:
            self.abort()  # those that were handed over have no reader, and the others leave the queue
            raise

    def begin(self) -> None:
        if not self.began.done():
            self.began.set_result(None)

    def choice_ended(self) -> None:
        self._open -= 1
        if self._open == 0:
            self._end()

    def fail(self, failure: Failed) -> None:
        """A choice failed: ends all of them."""
        if self.failure is None and not self.done.done():
            self.failure = failure
            self.abort()
            self._end()

    def abort(self) -> None:
        for choice in self.choices:
            self.link.abort(choice)

    def _end(self) -> None:
        self.begin()
        if not self.done.done():
            self.done.set_result(None)


def told_transfer(choices: Sequence[Choice]) -> dict[str, Any] | msgspec.UnsetType:
    """What an answer says of KV that was left for another engine: by the first choice, as all of a prompt leave one."""
    return next((choice.transfer for choice in choices if choice.transfer is not None), msgspec.UNSET)


def internal_failure(request_id: RequestId) -> Failed:
    return Failed(request_id, FailureKind.INTERNAL, "the server failed on this request; its log says why")
