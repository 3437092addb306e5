"""`Markers`: finds one of several fixed strings in text that comes in pieces."""

import re


class Markers:
    """A set of strings, none of which contains another.

    The marker that begins first wins. Since none lies inside another, the one that begins first is also the one that
    is complete first, so that the answer does not depend on how much text is there yet.
    """

    __slots__ = ("_beginnings", "_longest", "_pattern", "plain")

    def __init__(self, *markers: str) -> None:
        if not all(markers) or any(a in b for a in markers for b in markers if a is not b):
            raise ValueError(f"markers must not be empty nor contain each other: {markers}")
        self._pattern = re.compile("|".join(map(re.escape, markers)))
        self._beginnings = tuple({marker[:length] for marker in markers for length in range(1, len(marker))})
        self._longest = max(map(len, markers))
        starts = "".join(re.escape(start) for start in {marker[0] for marker in markers})
        # a piece of text in which no marker may begin, and which does not end with white space.
        self.plain = re.compile(rf"[^{starts}]*[^{starts} \t\r\n]")

    def find(self, text: str) -> "re.Match[str] | None":
        return self._pattern.search(text)

    def num_held(self, text: str) -> int:
        """Length of the longest end of a text that begins a marker."""
        if not text.endswith(self._beginnings):
            return 0
        lengths = range(min(self._longest - 1, len(text)), 0, -1)
        return next(length for length in lengths if text[-length:] in self._beginnings)
