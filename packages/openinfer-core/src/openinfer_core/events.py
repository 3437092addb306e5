"""What an engine says about its requests: `Scheduled | Tokens | Finished | Failed`.

    submit ──► Scheduled ──► Tokens* ──► Finished
         └──────────┴───────────┴──────► Failed

Each request gets exactly one terminal event (`Finished` or `Failed`), and nothing after it: the ledger in
`openinfer_core.ledger` enforces it in the step loop, whatever a scheduler does. Events are arrays on the wire
(`array_like`), tagged by their first element; fields are only ever appended.
"""

from enum import StrEnum
from typing import Any, TypeAlias

import msgspec

from openinfer_core.request import RequestId


class FinishReason(StrEnum):
    """Why a request ended well."""

    STOP = "stop"
    """A stop token was sampled, or the frontend ended it on a stop string."""
    LENGTH = "length"
    """`max_tokens` or the context length was reached."""
    ABORT = "abort"
    """The caller aborted it."""


class FailureKind(StrEnum):
    """Why a request failed; a frontend maps it to a status code."""

    INVALID = "invalid"
    """The engine cannot serve what was asked (too long, no grammar compiler)."""
    NOT_FOUND = "not_found"
    """The adapter that it names is not loaded, or was unloaded while it waited."""
    OVERLOADED = "overloaded"
    """The queue is full; try later."""
    DEADLINE = "deadline"
    """Its `deadline_s` was over before it had ended, or would have been: the scheduler gave it up early."""
    INTERNAL = "internal"
    """A fault inside this request (numbers, plug-in); others live on."""
    SHUTDOWN = "shutdown"
    """The engine is closing or died."""
    UNAVAILABLE = "unavailable"
    """What it needs is not to be had at the moment, such as a process that was killed; try later."""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probabilities (natural logarithm, of the unmodified logits) at one position."""

    logprob: float
    """The log-probability of the token that is there."""
    rank: int
    """1 + the number of likelier tokens in the whole vocabulary."""
    top_ids: tuple[int, ...]
    """The likeliest tokens, best first."""
    top_logprobs: tuple[float, ...]


class Scheduled(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="s"):
    """The request left the queue for the first time."""

    request_id: RequestId
    cached_tokens: int
    """Prompt tokens whose KV was found in a cache."""
    queued_s: float
    """Seconds from submission to this step."""


class Tokens(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="t"):
    """New tokens. A stop token ends the request and is not among them."""

    request_id: RequestId
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One per token id, if the request asked for them."""
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """Those of the next prompt tokens in order, from the second prompt token on; only before the first token id."""


class Finished(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="f"):
    """Terminal. Counts come from the ledger, not from the model."""

    request_id: RequestId
    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    """Sampled tokens, the stop token included."""
    cached_tokens: int
    stop_token_id: int | None = None
    """The stop token that ended it."""
    transfer: dict[str, Any] | None = None
    """Where the KV of the request was left, if its own `transfer` asked for that: for the engine that goes on."""
    accepted_drafts: int = 0
    """Tokens of it that were drafted before they were sampled."""
    rejected_drafts: int = 0
    """Drafts that were computed and not sampled."""


class Failed(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="e"):
    """Terminal. The message is safe to show to the client: it never quotes an exception."""

    request_id: RequestId
    kind: FailureKind
    message: str


TokenEvent: TypeAlias = Scheduled | Tokens | Finished | Failed
TerminalEvent: TypeAlias = Finished | Failed
