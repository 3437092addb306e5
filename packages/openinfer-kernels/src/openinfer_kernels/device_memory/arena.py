"""Arrays inside of a range of addresses: `Arena` places them, `RepeatedArena` places them where they were before."""

from bisect import bisect_left
from typing import Protocol

from openinfer_kernels.device_memory.mapped_range import MappedRange
from openinfer_kernels.errors import DeviceMemoryStateError, OutOfDeviceMemoryError

ALIGNMENT_BYTES = 512
"""Of every array, as in CuPy's own pool."""
GROWTH_BYTES = 32 << 20
"""Bounds both the calls of the driver and what is mapped in vain."""


class PlacesArrays(Protocol):
    """Hands out addresses of device memory."""

    def allocate(self, nbytes: int) -> int:
        """The address of as many bytes, above 0; raises `OutOfDeviceMemoryError` where there are none."""
        ...

    def free(self, address: int) -> None:
        """Takes back what `allocate` returned."""
        ...


class Arena:
    """First fit, with neighbours that are free made one; grows its range where nothing fits.

    Args:
        addresses: that it has alone.
        growth_bytes: that are mapped at a time, at least, where there is so much.
    """

    def __init__(self, addresses: MappedRange, *, growth_bytes: int = GROWTH_BYTES) -> None:
        self._range = addresses
        self._growth_bytes = growth_bytes
        self._sizes: dict[int, int] = {}
        self._free: list[tuple[int, int]] = []  # begin and size in bytes, sorted; no two touch each other
        self._end = 0  # of all that is handed out or free, from the range's begin

    @property
    def used_bytes(self) -> int:
        """From the begin of the range to the end of the last array that there was."""
        return self._end

    def allocate(self, nbytes: int) -> int:
        size = max(1, -(-nbytes // ALIGNMENT_BYTES)) * ALIGNMENT_BYTES
        address = self._take(size)
        if address is None:
            address = self._extend(size)
        self._sizes[address] = size
        return address

    def free(self, address: int) -> None:
        size = self._sizes.pop(address, None)
        if size is None:
            raise DeviceMemoryStateError(f"{address:#x} is no address of this arena that is in use")
        index = bisect_left(self._free, (address, size))
        if index < len(self._free) and self._free[index][0] == address + size:
            size += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == address:
            address, before = self._free.pop(index - 1)
            size, index = size + before, index - 1
        self._free.insert(index, (address, size))

    def check_integrity(self) -> None:
        """Raises `DeviceMemoryStateError` unless arrays and gaps cover what was handed out, once, and it is mapped."""
        at, was_free = self._range.begin, False
        free = set(self._free)
        for begin, size in sorted([*self._sizes.items(), *self._free]):
            is_free = (begin, size) in free
            if begin != at or size <= 0 or (is_free and was_free):
                raise DeviceMemoryStateError(f"arrays and gaps do not follow each other at {begin:#x}")
            at, was_free = at + size, is_free
        if at != self._range.begin + self._end or self._end > self._range.size_bytes:
            raise DeviceMemoryStateError("arrays lie where nothing is mapped")

    def _take(self, size: int) -> int | None:
        for index, (begin, free) in enumerate(self._free):
            if free >= size:
                self._free[index : index + 1] = [(begin + size, free - size)] if free > size else []
                return begin
        return None

    def _extend(self, size: int) -> int:
        """At the end, where a gap may begin what is needed."""
        end, gap = self._range.begin + self._end, 0
        if self._free and sum(self._free[-1]) == end:
            gap = self._free[-1][1]
        needed = self._end - gap + size
        if needed > self._range.size_bytes:
            self._grow(needed)
        if gap:
            self._free.pop()
        self._end = needed
        return end - gap

    def _grow(self, needed_bytes: int) -> None:
        more = min(self._range.size_bytes + self._growth_bytes, self._range.reserved_bytes)
        if more > needed_bytes:
            try:
                self._range.grow_to(more)
            except OutOfDeviceMemoryError:
                more = needed_bytes  # the last of a device's memory is taken as it is needed
        self._range.grow_to(max(more, needed_bytes))


class RepeatedArena:
    """An arena whose arrays are made several times, each time in the same order and of the same sizes.

        first pass ── restart ──► again: the first array is where the first one was, and so on

    From the first `restart` on nothing is freed: what an array of an earlier pass had is the next pass's.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._passed: list[tuple[int, int]] = []  # address and bytes, in the order of the first pass
        self._next: int | None = None  # None during the first pass

    @property
    def used_bytes(self) -> int:
        return self._arena.used_bytes

    def allocate(self, nbytes: int) -> int:
        """The next array.

        Raises:
            DeviceMemoryStateError: there was none of this size here in the first pass.
        """
        if self._next is None:
            address = self._arena.allocate(nbytes)
            self._passed.append((address, nbytes))
            return address
        expected = self._passed[self._next] if self._next < len(self._passed) else (0, 0)
        if expected[1] != nbytes:
            raise DeviceMemoryStateError(
                f"array {self._next} of the weights has {nbytes} bytes, and had {expected[1]} when the engine started: "
                "these weights cannot take the places of the first ones"
            )
        self._next += 1
        return expected[0]

    def free(self, address: int) -> None:
        if self._next is None:
            self._arena.free(address)

    def restart(self) -> None:
        """The next array is the first one."""
        self._next = 0

    def check_complete(self) -> None:
        """Raises `DeviceMemoryStateError` unless all arrays of the first pass have come again."""
        if self._next not in (None, len(self._passed)):
            raise DeviceMemoryStateError(
                f"{self._next} arrays of weights were made, and {len(self._passed)} when the engine started"
            )
