"""Anthropic's marks (`cache_control`): of each time to live the last one, in the order in which a prompt is made of
tools, system prompt and messages, is the end of a prefix that is kept so long.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from openinfer_server.anthropic.blocks import BlockMark, MarkedTurn
from openinfer_server.chat.prefix_marks import PrefixMark, TurnText
from openinfer_server.http.api_errors import convert_inside
from openinfer_server.request.retention import TTL_S, CacheControl


@dataclass(frozen=True, slots=True)
class CacheMark:
    """Where a prefix ends that is kept, and for how many seconds."""

    seconds: float
    place: PrefixMark


def cache_marks(
    turns: Sequence[MarkedTurn], *, num_before: int, before: Sequence[object], whole: CacheControl | None
) -> list[CacheMark]:
    """The marks of a request that count, at most one of each time to live.

    Raises:
        ApiError: 400; what is no mark is on a tool that was dropped unread.

    Args:
        turns: of its messages.
        num_before: turns of the chat before these, the system prompt's.
        before: what comes before messages: tools and system prompt, of which blocks with marks are mappings.
        whole: the request's own mark, which is on its last block.
    """
    last: dict[float, PrefixMark] = {}
    for control in _controls(before):
        _put(last, control, PrefixMark(None, _first_text(turns, 0, num_before)))
    for index, (_, marks) in enumerate(turns):
        for mark in marks:
            _put(last, mark.control, _place(turns, index, num_before, mark))
    if whole is not None and turns:
        index = len(turns) - 1
        _put(last, whole, _place(turns, index, num_before, BlockMark(whole, 0, len(_text(turns[index])))))
    return [CacheMark(seconds, place) for seconds, place in last.items()]


def _put(last: dict[float, PrefixMark], control: CacheControl, place: PrefixMark) -> None:
    last[TTL_S[control.ttl or "5m"]] = place


def _place(turns: Sequence[MarkedTurn], index: int, num_before: int, mark: BlockMark) -> PrefixMark:
    shows = not _text(turns[index])[mark.begin : mark.end].isspace() and mark.end > mark.begin
    marked = TurnText(num_before + index, mark.begin, mark.end) if shows else None
    return PrefixMark(marked, _first_text(turns, index + 1, num_before))


def _first_text(turns: Sequence[MarkedTurn], begin: int, num_before: int) -> TurnText | None:
    for index in range(begin, len(turns)):
        text = _text(turns[index])
        if text and not text.isspace():
            return TurnText(num_before + index, 0, len(text))
    return None


def _text(turn: MarkedTurn) -> str:
    content = turn.turn.content
    return content if isinstance(content, str) else ""  # no message here has parts


def _controls(parts: Sequence[object]) -> Iterator[CacheControl]:
    for part in parts:
        for block in cast("list[dict[str, Any]]", part) if isinstance(part, list) else ():
            mark = block.get("cache_control")
            if mark is not None:
                yield convert_inside(mark, CacheControl, "cache_control")
