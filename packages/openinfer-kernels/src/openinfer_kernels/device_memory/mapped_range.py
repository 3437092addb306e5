"""`MappedRange`: addresses for good, and memory for as long as it is needed.

    reserved ── grow_to ──► mapped ◄── map_again ── unmapped
                              └──────── unmap ─────────▲
    close, from every state: the addresses are gone, too

What has been mapped once is a prefix of the range. It is given back whole and comes back whole, at the same addresses;
what was written there is lost.
"""

from enum import StrEnum

from openinfer_kernels.device_memory.physical import PhysicalMemory
from openinfer_kernels.errors import DeviceMemoryStateError, OutOfDeviceMemoryError


class RangeState(StrEnum):
    """See the diagram; a range of which nothing was mapped yet is mapped."""

    MAPPED = "mapped"
    UNMAPPED = "unmapped"
    CLOSED = "closed"


class MappedRange:
    """One range.

    Args:
        memory: that backs it.
        reserved_bytes: the most that can ever be mapped; rounded up to the granularity. Addresses cost no memory.
    """

    def __init__(self, memory: PhysicalMemory, reserved_bytes: int) -> None:
        self._memory = memory
        self._reserved_bytes = _rounded_up(reserved_bytes, memory.granularity_bytes)
        self._begin = memory.reserve(self._reserved_bytes)
        self._size_bytes = 0
        self._state = RangeState.MAPPED

    @property
    def begin(self) -> int:
        """The first address."""
        return self._begin

    @property
    def reserved_bytes(self) -> int:
        return self._reserved_bytes

    @property
    def size_bytes(self) -> int:
        """Mapped, or to be mapped again."""
        return self._size_bytes

    @property
    def state(self) -> RangeState:
        return self._state

    def grow_to(self, nbytes: int) -> None:
        """Maps more, so that at least the first `nbytes` are.

        Raises:
            OutOfDeviceMemoryError: there is not so much, or it was not reserved; nothing has changed.
            DeviceMemoryStateError: the range is not mapped.
        """
        self._require(RangeState.MAPPED)
        size_bytes = _rounded_up(nbytes, self._memory.granularity_bytes)
        if size_bytes > self._reserved_bytes:
            raise OutOfDeviceMemoryError(
                f"{nbytes} bytes were asked for in a range of {self._reserved_bytes} reserved ones"
            )
        if size_bytes > self._size_bytes:
            self._memory.map(self._begin + self._size_bytes, size_bytes - self._size_bytes)
            self._size_bytes = size_bytes

    def unmap(self) -> None:
        """Gives the memory back; nothing to do if it was. No kernel that uses it may be under way."""
        if self._state is RangeState.UNMAPPED:
            return
        self._require(RangeState.MAPPED)
        if self._size_bytes:
            self._memory.unmap(self._begin, self._size_bytes)
        self._state = RangeState.UNMAPPED

    def map_again(self) -> None:
        """Backs what was mapped before; it may hold anything. Nothing to do if it is mapped.

        Raises:
            OutOfDeviceMemoryError: there is not so much; the range stays unmapped.
        """
        if self._state is RangeState.MAPPED:
            return
        self._require(RangeState.UNMAPPED)
        if self._size_bytes:
            self._memory.map(self._begin, self._size_bytes)
        self._state = RangeState.MAPPED

    def close(self) -> None:
        """Gives memory and addresses back; idempotent."""
        if self._state is RangeState.CLOSED:
            return
        self.unmap()
        self._memory.release(self._begin, self._reserved_bytes)
        self._state = RangeState.CLOSED

    def _require(self, state: RangeState) -> None:
        if self._state is not state:
            raise DeviceMemoryStateError(f"device memory is {self._state}, and has to be {state} for this")


def _rounded_up(nbytes: int, multiple: int) -> int:
    return -(-nbytes // multiple) * multiple
