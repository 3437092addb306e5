"""Bounds on what a conversation is made of: how many entries, and how deep the JSON in one of them.

Bodies are bounded in bytes, but eight megabytes can be a quarter of a million empty turns, or one schema a thousand
brackets deep; either would cost far more than its bytes.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from openinfer_server.http.api_errors import invalid

T = TypeVar("T")

MAX_ENTRIES = 2**14  # items or messages of a conversation, their parts counted too
INLINE_ENTRIES = 256  # longer conversations are read in a thread
MAX_DEPTH = 64  # of a tool's schema or input


async def read_conversation(given: Sequence[Any], field: str, read: Callable[[], T]) -> T:
    """Reads a conversation, in a thread if it is long.

    Raises:
        ApiError: 400; there are too many entries, or what `read` raises.
    """

    def counted() -> T:
        check_num_entries(given, field)
        return read()

    if len(given) > INLINE_ENTRIES:  # counting all their parts is long work, too
        return await asyncio.to_thread(counted)
    return read() if check_num_entries(given, field) <= INLINE_ENTRIES else await asyncio.to_thread(read)


def check_num_entries(given: Sequence[Any], field: str) -> int:
    """Counts the entries of a conversation."""
    num_entries = len(given)
    if num_entries <= MAX_ENTRIES:
        num_entries += sum(map(_num_parts, given))
    if num_entries > MAX_ENTRIES:
        raise invalid(field, f"{field} has {num_entries} entries or more; at most {MAX_ENTRIES} are possible")
    return num_entries


def _num_parts(piece: Any) -> int:
    if isinstance(piece, dict):
        fields = cast("dict[str, Any]", piece)
        parts = fields.get("content", fields.get("output"))
    else:
        parts = piece.content
    return len(cast("list[Any]", parts)) if isinstance(parts, list) else 0


def check_depth(value: object, field: str) -> None:
    """Checks how deep JSON is nested."""
    # What is a little less deep than the decoder bears is too deep for the next one.
    level: list[object] = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return
    raise invalid(field, f"{field} is nested more than {MAX_DEPTH} deep")


def _inside(value: object) -> Sequence[object]:
    if isinstance(value, dict):
        return list(cast("dict[str, object]", value).values())
    return cast("list[object]", value) if isinstance(value, list) else ()
