"""`StopScanner`: finds stop strings in text that arrives in pieces, and holds back what may be the start of one.

The result does not depend on how the text is cut: the stop string that is complete first wins, and of those that are
complete at the same character the one that began first. (Taking the earliest start instead would: of "abcd" and
"bc", "abcd" wins in the whole text and "bc" when "abc" arrives first.)
"""

import re
from collections.abc import Sequence


class StopScanner:
    """Watches one text for any of its stop strings."""

    __slots__ = (
        "_any",
        "_beginnings",
        "_beginnings_set",
        "_held",
        "_longest",
        "_shows_stop",
        "_stops",
        "found",
        "matched",
    )

    def __init__(self, stops: Sequence[str], *, shows_stop: bool = False) -> None:
        self._any = re.compile("|".join(map(re.escape, stops)))
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops))
        self._beginnings_set = {stop[:length] for stop in self._stops for length in range(1, len(stop))}
        self._beginnings = tuple(self._beginnings_set)  # str.endswith takes no set
        self._held = ""
        self._shows_stop = shows_stop  # whether the stop string is part of the text
        self.found = False  # whether a stop string is complete; nothing more shows then
        self.matched: str | None = None  # the one that is

    def feed(self, piece: str) -> str:
        """Takes the next piece; returns the text that can be shown."""
        text = self._held + piece
        # one search for all stop strings rejects nearly every piece; `_first_stop` looks for each
        first = None if self._any.search(text) is None else self._first_stop(text)
        if first is not None:
            end, begin = first
            self.found, self.matched, self._held = True, text[begin:end], ""
            return text[: end if self._shows_stop else begin]
        shown = len(text) - self._held_characters(text)
        self._held = text[shown:]
        return text[:shown]

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held

    def _first_stop(self, text: str) -> tuple[int, int] | None:
        matches = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        return min(matches, default=None)

    def _held_characters(self, text: str) -> int:
        """Length of the longest end of the text that begins a stop string."""
        if not text.endswith(self._beginnings):
            return 0
        lengths = range(min(self._longest - 1, len(text)), 0, -1)
        return next(length for length in lengths if text[-length:] in self._beginnings_set)
