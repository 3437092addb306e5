"""What clients say of how long their prefixes are to be kept: fields, and what the engine is told.

Anthropic's marks are on blocks, and keep the prompt up to them (`anthropic/marks.py`). OpenAI's fields are the
request's, and keep all that it leaves. Either is an order of eviction within the tenant's share, for which no request
waits (`GenerateRequest`).
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from openinfer_core import RetainedPrefix
from openinfer_server.request.fields import RequestFields

TTL_S: Mapping[str, float] = {"5m": 300.0, "1h": 3600.0}
IN_MEMORY_S = 600.0
"""OpenAI: five to ten minutes without a request."""
A_DAY_S = 86_400.0

CacheRetention: TypeAlias = Literal["in-memory", "in_memory", "24h"]


class CacheControl(RequestFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Anthropic's mark on a block: what comes before and this are kept for so long."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None  # five minutes


@dataclass(frozen=True, slots=True)
class Retention:
    """What the engine is told.

    Attributes:
        seconds: for which what a request leaves goes after what others left; None asks for nothing.
        key: of the conversation.
        prefixes: of the prompt, each with its own time.
    """

    seconds: float | None = None
    key: str | None = None
    prefixes: tuple[RetainedPrefix, ...] = ()


@dataclass(frozen=True, slots=True)
class KeptPrompt:
    """What of a prompt is kept, in the tokens of full blocks.

    Attributes:
        retention: that was asked for.
        block_size_tokens: of the engine.
    """

    retention: Retention
    block_size_tokens: int

    def created(self, prompt_tokens: int, cached_tokens: int) -> tuple[int, int]:
        """Tokens of a prompt that were not cached before: kept for less than an hour, and for an hour or more."""
        full = prompt_tokens // self.block_size_tokens * self.block_size_tokens
        kept = [(prefix.num_tokens, prefix.retain_s) for prefix in self.retention.prefixes]
        if self.retention.seconds is not None:
            kept.append((full, self.retention.seconds))
        for_an_hour = min(full, max((end for end, seconds in kept if seconds >= TTL_S["1h"]), default=0))
        at_all = min(full, max((end for end, _ in kept), default=0))
        return max(0, at_all - max(for_an_hour, cached_tokens)), max(0, for_an_hour - cached_tokens)


def retention_of(key: str | None, retention: CacheRetention | None) -> Retention:
    """Of OpenAI's fields; a key alone is kept in memory."""
    if key is None and retention is None:
        return Retention()
    # a digest: keys may be of any length, and nothing of them is wanted in the engine
    name = None if key is None else hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
    return Retention(A_DAY_S if retention == "24h" else IN_MEMORY_S, name)
