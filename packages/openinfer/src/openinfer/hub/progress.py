"""How far a download is: a line that is rewritten in place on a terminal, a line every ten seconds in a log."""

import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

_ON_TERMINAL_S = 0.2
_IN_LOG_S = 10.0
_GIGA = 1e9
_BAR = 24


class DownloadProgress:
    """`ORG/NAME [########----------------] 3.10 of 8.04 GB, 211 MB/s`. A context manager; its end is a line, too.

    Args:
        name: what is downloaded.
        total_bytes: of all files that are not in the cache.
        present_bytes: of them, what an earlier download left.
        stream: standard error unless given.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        name: str,
        total_bytes: int,
        *,
        present_bytes: int = 0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._total_bytes = total_bytes
        self._present_bytes = present_bytes
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._lock = threading.Lock()
        self._done_bytes = present_bytes
        self._begin_s = self._shown_s = clock()
        self._in_place = self._stream.isatty()
        self._between_s = _ON_TERMINAL_S if self._in_place else _IN_LOG_S

    def __enter__(self) -> Self:
        self._show()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._show()
        if self._in_place:
            self._stream.write("\n")

    def advance(self, num_bytes: int) -> None:
        """Counts bytes that arrived; negative ones have to come again."""
        with self._lock:
            self._done_bytes += num_bytes
            now_s = self._clock()
            if now_s - self._shown_s >= self._between_s:
                self._shown_s = now_s
                self._show()

    def _show(self) -> None:
        done, total = self._done_bytes, max(self._total_bytes, 1)
        seconds = max(self._clock() - self._begin_s, 1e-9)
        filled = min(_BAR, _BAR * done // total)
        bar = "#" * filled + "-" * (_BAR - filled)
        speed = max(done - self._present_bytes, 0) / seconds / 1e6
        line = f"{self._name} [{bar}] {done / _GIGA:.2f} of {self._total_bytes / _GIGA:.2f} GB, {speed:.0f} MB/s"
        self._stream.write(f"\r\x1b[2K{line}" if self._in_place else f"openinfer: {line}\n")
        self._stream.flush()
