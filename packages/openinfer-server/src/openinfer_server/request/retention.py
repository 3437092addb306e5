"""What clients say of how long their prefixes are to be kept: fields, and what the engine is told.

Anthropic's marks are on blocks, and say to keep what they end. Here a mark keeps the whole turn, which ends with the
last mark where clients mark as Anthropic's documentation says. OpenAI's fields are the request's. Either is an order of
eviction within the tenant's share, for which no request waits (`GenerateRequest.retain_s`).
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

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
    """

    seconds: float | None = None
    key: str | None = None


def retention_of(key: str | None, retention: CacheRetention | None) -> Retention:
    """Of OpenAI's fields; a key alone is kept in memory."""
    if key is None and retention is None:
        return Retention()
    # a digest: keys may be of any length, and nothing of them is wanted in the engine
    name = None if key is None else hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
    return Retention(A_DAY_S if retention == "24h" else IN_MEMORY_S, name)


def marked(given: Retention, *parts: object) -> Retention:
    """Of Anthropic's marks, checked before: on a request, its tools, its system prompt and its messages' blocks.

    Of these and what is given, which OpenAI's fields say, the longest counts.
    """
    marks = [mark for part in parts for mark in _marks(part)]
    if given.seconds is not None:
        marks.append(given.seconds)
    return Retention(max(marks, default=None), given.key)


def _marks(part: object) -> Iterable[float]:
    if isinstance(part, CacheControl):
        yield TTL_S[part.ttl or "5m"]
    elif isinstance(part, list):
        for each in cast("list[object]", part):
            if isinstance(each, dict):
                block = cast("dict[str, Any]", each)
                if isinstance(mark := block.get("cache_control"), dict):
                    yield TTL_S[cast("dict[str, str]", mark).get("ttl") or "5m"]
