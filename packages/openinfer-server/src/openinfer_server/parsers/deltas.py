"""What a parser says about the text it was fed.

    ContentDelta | ReasoningDelta | CallStart ─► CallArguments* ─► CallEnd

Texts of one kind that follow each other are one text, wherever they are cut. Calls are numbered from 0 in the order
they begin, one is open at a time, and nothing else is said between its `CallStart` and its `CallEnd`.
"""

from collections.abc import Iterable
from typing import Final, TypeAlias, cast, get_args

import msgspec


class ContentDelta(msgspec.Struct, frozen=True, gc=False):
    """More of the answer."""

    text: str


class ReasoningDelta(msgspec.Struct, frozen=True, gc=False):
    """More of what the model thinks before its answer."""

    text: str


class CallStart(msgspec.Struct, frozen=True, gc=False):
    """A tool call begins."""

    index: int
    call_id: str
    name: str


class CallArguments(msgspec.Struct, frozen=True, gc=False):
    """More of the arguments of the call that is open: JSON, as far as the model wrote it."""

    index: int
    text: str


class CallEnd(msgspec.Struct, frozen=True, gc=False):
    """The call that is open gets nothing more."""

    index: int


Delta: TypeAlias = ContentDelta | ReasoningDelta | CallStart | CallArguments | CallEnd

_DELTAS: Final = frozenset(get_args(Delta))


def check_deltas(deltas: object) -> list[Delta]:
    """What a parser has said, as it was said.

    Raises:
        TypeError: it is no list of deltas. A generator is none: it could go on for ever, and raise anywhere.
    """
    if not isinstance(deltas, list):
        raise TypeError(f"a parser said {type(deltas).__name__}, not a list of deltas")
    for delta in cast("list[object]", deltas):
        if type(delta) not in _DELTAS:
            raise TypeError(f"a parser said {type(delta).__name__}, which is no delta")
    return cast("list[Delta]", deltas)


def merge(deltas: Iterable[Delta]) -> list[Delta]:
    """The same with neighbouring texts of one kind put together: what does not depend on how the text was cut."""
    merged: list[Delta] = []
    for delta in deltas:
        last = merged[-1] if merged else None
        match delta, last:
            case ContentDelta(), ContentDelta():
                merged[-1] = ContentDelta(last.text + delta.text)
            case ReasoningDelta(), ReasoningDelta():
                merged[-1] = ReasoningDelta(last.text + delta.text)
            case CallArguments(), CallArguments():
                merged[-1] = CallArguments(delta.index, last.text + delta.text)
            case _:
                merged.append(delta)
    return merged
