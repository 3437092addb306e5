"""How far the weights are: a line that is rewritten in place on a terminal, one line at the end in a log."""

import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

_BETWEEN_S = 0.2
_GIGA = 1e9


class LoadProgress:
    """`openinfer: weights 3.1 of 8.0 GB, 45.1 GB/s`. A context manager: leaving it without an error prints the end."""

    def __init__(
        self, total_bytes: int, *, stream: TextIO | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._total_bytes = total_bytes
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._lock = threading.Lock()
        self._done_bytes = 0
        self._begin_s = clock()
        self._shown_s = self._begin_s
        self._in_place = self._stream.isatty()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._in_place and (kind is None or self._shown_s > self._begin_s):
            self._show(self._done_bytes if kind else self._total_bytes, end="\n")

    def advance(self, num_bytes: int) -> None:
        with self._lock:
            self._done_bytes += num_bytes
            now_s = self._clock()
            if self._in_place and now_s - self._shown_s >= _BETWEEN_S:
                self._shown_s = now_s
                self._show(self._done_bytes)

    def _show(self, done_bytes: int, *, end: str = "") -> None:
        passed_s = max(self._clock() - self._begin_s, 1e-9)
        self._stream.write(
            f"\r\x1b[2Kopeninfer: weights {done_bytes / _GIGA:.1f} of {self._total_bytes / _GIGA:.1f} GB, "
            f"{done_bytes / _GIGA / passed_s:.1f} GB/s{end}"
        )
        self._stream.flush()
