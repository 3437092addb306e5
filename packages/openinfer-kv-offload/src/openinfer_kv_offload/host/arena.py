"""`Arena`: one region of this process's memory, cut into blocks of equal size."""

import mmap
from collections.abc import Callable, Sequence
from typing import Protocol

from openinfer_kv_offload.transfer.memory import copy_bytes

_HUGE_PAGE_BYTES = 2 * 2**20


class Medium(Protocol):
    """What a tier writes to and reads from; `openinfer_kv_cache.testing.tier_contract.FaultyMedium` is another."""

    def write(self, offset_bytes: int, parts: Sequence[memoryview]) -> None:
        """Writes the parts one after the other; any exception means that nothing there can be relied on."""
        ...

    def read(self, offset_bytes: int, into: memoryview) -> None:
        """Fills `into`."""
        ...


WrapMedium = Callable[[Medium], Medium]
"""Puts something between a tier and its medium: fault injection."""


def as_it_is(medium: Medium) -> Medium:
    """Nothing in between."""
    return medium


class Arena:
    """Anonymous memory, on huge pages where the kernel has them; pages are taken when they are first written.

    Args:
        capacity_bytes: rounded up to whole huge pages.
    """

    def __init__(self, capacity_bytes: int) -> None:
        size_bytes = -(-capacity_bytes // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        # Shared memory, which is what mmap gives by default, gets huge pages almost nowhere.
        self._map = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._view = memoryview(self._map)

    def view(self, offset_bytes: int, num_bytes: int) -> memoryview:
        """A piece of it, where it lies; all of it is taken when it is first written."""
        return self._view[offset_bytes : offset_bytes + num_bytes]

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return len(self._view)

    def write(self, offset_bytes: int, parts: Sequence[memoryview]) -> None:
        """Copies the parts into the arena."""
        for part in parts:
            copy_bytes(self._view[offset_bytes : offset_bytes + len(part)], part)
            offset_bytes += len(part)

    def read(self, offset_bytes: int, into: memoryview) -> None:
        """Copies out of the arena."""
        copy_bytes(into, self._view[offset_bytes : offset_bytes + len(into)])
