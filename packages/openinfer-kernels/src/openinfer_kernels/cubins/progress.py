"""One line of progress on standard error: rewritten in place on a terminal, one line per step in a log."""

import sys
from types import TracebackType
from typing import Self


class Progress:
    """`openinfer: TITLE 3/7: norm 2.1 s`. A context manager: leaving it ends the line."""

    def __init__(self, title: str, *, total: int) -> None:
        self._title = title
        self._total = total
        self._done = 0
        self._in_place = sys.stderr.isatty()

    def __enter__(self) -> Self:
        self._show("")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._in_place:
            sys.stderr.write("\n")

    def step(self, text: str) -> None:
        """One more is done; `text` says which."""
        self._done += 1
        self._show(f": {text}")

    def _show(self, text: str) -> None:
        begin, end = ("\r\x1b[2K", "") if self._in_place else ("", "\n")
        sys.stderr.write(f"{begin}openinfer: {self._title} {self._done}/{self._total}{text}{end}")
        sys.stderr.flush()
