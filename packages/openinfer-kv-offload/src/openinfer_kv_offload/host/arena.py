"""`Arena`: one region of this process's memory, cut into blocks of equal size."""

import mmap
from collections.abc import Sequence

from openinfer_kv_offload.transfer.memory import copy_bytes

_HUGE_PAGE_BYTES = 2 * 2**20


class Arena:
    """Anonymous memory in whole huge pages, where the kernel has them; pages are taken when they are first written."""

    def __init__(self, capacity_bytes: int) -> None:
        size_bytes = -(-capacity_bytes // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        # Shared memory, which is what mmap gives by default, gets huge pages almost nowhere.
        self._map = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._view = memoryview(self._map)

    def view(self, offset_bytes: int, num_bytes: int) -> memoryview:
        return self._view[offset_bytes : offset_bytes + num_bytes]

    @property
    def num_bytes(self) -> int:
        return len(self._view)

    def write(self, offset_bytes: int, parts: Sequence[memoryview]) -> None:
        for part in parts:
            copy_bytes(self._view[offset_bytes : offset_bytes + len(part)], part)
            offset_bytes += len(part)

    def read(self, offset_bytes: int, into: memoryview) -> None:
        copy_bytes(into, self._view[offset_bytes : offset_bytes + len(into)])
