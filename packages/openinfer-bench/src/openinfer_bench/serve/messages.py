"""What the benchmark and its client processes tell each other: msgpack over pipes."""

import msgspec
import numpy as np
from numpy.typing import NDArray


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """The server under load."""

    host: str
    port: int
    path: str
    """Of the URL, before `/v1/completions`."""
    model: str
    headers: dict[str, str] = {}


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One request."""

    prompt: bytes
    """Token ids, int32, little endian as in memory."""
    output_tokens: int
    at_s: float | None = None
    """When it is sent, in seconds after the begin; None: as soon as one of the worker's places is free."""
    abort_after: int | None = None
    """Events after which the client leaves; None stays to the end."""
    cache_salt: str | None = None
    """Prefixes are shared with requests of the same salt alone."""
    top_logprobs: int | None = None
    """Asks for log-probabilities, of as many alternatives, and for token ids; None asks for neither."""

    @property
    def prompt_ids(self) -> list[int]:
        """As the request carries them."""
        return np.frombuffer(self.prompt, np.int32).tolist()


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """What one client process does."""

    target: Target
    jobs: list[Job]
    places: int
    """Requests in flight at most; of those that have no time of their own."""
    begin_at_s: float
    """Unix time."""


class ScoredToken(msgspec.Struct, frozen=True, array_like=True):
    """A generated token as `/v1/completions` spells it."""

    text: str
    logprob: float
    top: dict[str, float]
    """Alternatives by their spelling; the token is one of them."""


class Outcome(msgspec.Struct, kw_only=True):
    """What became of a request. Times are of the machine's monotonic clock, in seconds."""

    begin_s: float
    """When it was sent."""
    times: bytes = b""
    """float64: when each event with text arrived."""
    tokens: int = 0
    """As the server counts them, else the events."""
    cached_tokens: int = 0
    """Of the prompt, found in a cache, where the server says so."""
    tells_cached: bool = False
    """Whether it does. A server may say nothing where it found nothing."""
    token_ids: list[int] = []
    """What was generated, where it was asked for and the server tells."""
    scored: list[ScoredToken] = []
    aborted: bool = False
    """The client left, as it was told."""
    error: str = ""
    """Empty if the request did what it was asked."""

    @property
    def times_s(self) -> NDArray[np.float64]:
        """`times` as numbers."""
        return np.frombuffer(self.times, np.float64)
