"""Where a mark of a client is in the rendered chat: characters of the marked text carry a flag through the template.

    turns      | system | user: the marked block | assistant | user |
    rendered   <s>…… the marked block ⟨end⟩ …………… ⟨next⟩ what follows it ……

The marked prefix ends with the last character of the marked text. Where that does not show, or the mark is on what is
no text of a turn (a call, tools, the system prompt, next to which templates write tools), it ends where the first text
after it begins; where that does not show either, the whole prompt is the prefix. So never less is kept than is asked.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from openinfer_server.chat.turns import TemplateTurn
from openinfer_server.text.marked_text import FLAGS, MarkedText, origins_of

MAX_MARKS = len(FLAGS) // 2
"""In one chat."""
_FLAG_PAIRS = tuple(pairwise(FLAGS))[::2]


class TurnText(NamedTuple):
    """A stretch of the text of a turn, by the turn's number."""

    turn: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class PrefixMark:
    """The end of a prefix.

    Attributes:
        marked: the text that it is on; None if it is on no text, or an empty one.
        following: text after it; None if there is none.
    """

    marked: TurnText | None
    following: TurnText | None


def flagged_turns(turns: Sequence[TemplateTurn], marks: Sequence[PrefixMark]) -> list[TemplateTurn]:
    """Turns whose texts carry the flags of at most `MAX_MARKS` marks."""
    flagged = list(turns)
    for mark, flags in zip(marks, _FLAG_PAIRS, strict=False):
        for place, flag in zip((mark.marked, mark.following), flags, strict=True):
            content = None if place is None else flagged[place.turn].get("content")
            if place is not None and isinstance(content, str):
                text = MarkedText(content, origins_of(content)).flagged(place.begin, place.end, flag)
                flagged[place.turn] = {**flagged[place.turn], "content": text}
    return flagged


def prefix_ends(text: MarkedText, marks: Sequence[PrefixMark]) -> tuple[int, ...]:
    """Characters of each mark's prefix in a rendered chat."""
    return tuple(_end(text, *flags) for _, flags in zip(marks, _FLAG_PAIRS, strict=False))


def _end(text: MarkedText, marked_flag: int, following_flag: int) -> int:
    marked = text.flagged_range(marked_flag)
    if marked is not None:
        return marked[1]
    following = text.flagged_range(following_flag)
    return len(text) if following is None or not following[0] else following[0]
