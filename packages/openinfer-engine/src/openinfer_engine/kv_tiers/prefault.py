"""Taking a tier's memory before it is needed: gigabytes of pages take seconds, which a start has beside the weights."""

import re
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

_THREADS = 8
_PAGE_BYTES = 4096
_CHUNK_PAGES = 1 << 16


class MemoryPrefault:
    """Writes to every page of memory that is not in use yet, in threads.

    Args:
        memory: writable; its content is void afterwards.
    """

    def __init__(self, memory: Sequence[memoryview]) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="openinfer-pages")
        self._chunks: list[Future[None]] = [
            self._threads.submit(_take, region[begin : begin + _CHUNK_PAGES * _PAGE_BYTES])
            for region in memory
            for begin in range(0, len(region), _CHUNK_PAGES * _PAGE_BYTES)
        ]

    def finish(self) -> None:
        for chunk in self._chunks:
            chunk.result()
        self._threads.shutdown()

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)


def available_bytes(root: Path = Path("/")) -> int | None:
    """Memory that may still be taken: of the machine, and at most what a container may have; None if unknown.

    Args:
        root: of the file system.
    """
    found: list[int] = []
    memory, limit = root / "proc/meminfo", root / "sys/fs/cgroup/memory.max"
    if memory.exists() and (said := re.search(r"^MemAvailable:\s+(\d+) kB$", memory.read_text(), re.M)):
        found.append(int(said.group(1)) * 1024)
    if limit.exists() and (text := limit.read_text().strip()).isdecimal():
        found.append(int(text))
    return min(found, default=None)


def _take(chunk: memoryview) -> None:
    np.frombuffer(chunk, np.uint8)[::_PAGE_BYTES] = 0
