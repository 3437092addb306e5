"""`FakePhysicalMemory`: a driver's virtual memory without a GPU, which refuses what a driver refuses.

What is written to a backed address is lost when it is unmapped, and new memory holds what it likes: `CONTENT`.
"""

from collections.abc import Iterator

from openinfer_kernels.errors import OutOfDeviceMemoryError
from openinfer_kernels.testing.errors import ConformanceError

CONTENT = 113
"""In every byte of memory that was just mapped."""


class FakePhysicalMemory:
    """Implements `openinfer_kernels.device_memory.physical.PhysicalMemory`.

    Args:
        total_bytes: of the device; `taken_bytes` are another process's, and may be set.
        granularity_bytes: of everything.
    """

    def __init__(self, *, total_bytes: int, granularity_bytes: int = 4096) -> None:
        self.total_bytes = total_bytes
        self.taken_bytes = 0
        self.calls: list[str] = []
        self._granularity_bytes = granularity_bytes
        self._reserved: dict[int, int] = {}
        self._mapped: dict[int, bytearray] = {}
        self._next = granularity_bytes

    @property
    def granularity_bytes(self) -> int:
        return self._granularity_bytes

    @property
    def used_bytes(self) -> int:
        """Of the device, by us."""
        return sum(map(len, self._mapped.values()))

    @property
    def reserved_bytes(self) -> int:
        return sum(self._reserved.values())

    def reserve(self, nbytes: int) -> int:
        self._require_whole(nbytes)
        address, self._next = self._next, self._next + nbytes + self._granularity_bytes
        self._reserved[address] = nbytes
        return address

    def release(self, address: int, nbytes: int) -> None:
        if self._reserved.pop(address, None) != nbytes:
            raise ConformanceError("what is released was reserved at once")
        if any(self._pieces(address, nbytes)):
            raise ConformanceError("addresses are released while memory backs them")

    def map(self, address: int, nbytes: int) -> None:
        self.calls.append("map")
        self._require_whole(address, nbytes)
        if not any(begin <= address and address + nbytes <= begin + size for begin, size in self._reserved.items()):
            raise ConformanceError("memory is mapped to addresses that were not reserved")
        if any(self._pieces(address, nbytes)):
            raise ConformanceError("memory is mapped to addresses that have some")
        if self.used_bytes + self.taken_bytes + nbytes > self.total_bytes:
            raise OutOfDeviceMemoryError(f"{nbytes} bytes")
        self._mapped[address] = bytearray([CONTENT]) * nbytes

    def unmap(self, address: int, nbytes: int) -> None:
        self.calls.append("unmap")
        pieces = sorted(self._pieces(address, nbytes))
        if not pieces or pieces[0] != address or sum(len(self._mapped[each]) for each in pieces) != nbytes:
            raise ConformanceError("what is unmapped is whole pieces of `map`, without gaps")
        for each in pieces:
            del self._mapped[each]

    def write(self, address: int, content: bytes) -> None:
        begin, piece = self._piece_of(address, len(content))
        piece[address - begin : address - begin + len(content)] = content

    def read(self, address: int, nbytes: int) -> bytes:
        begin, piece = self._piece_of(address, nbytes)
        return bytes(piece[address - begin : address - begin + nbytes])

    def _pieces(self, address: int, nbytes: int) -> Iterator[int]:
        """Begins of pieces that share an address with this range."""
        return (each for each, piece in self._mapped.items() if each < address + nbytes and address < each + len(piece))

    def _piece_of(self, address: int, nbytes: int) -> tuple[int, bytearray]:
        for begin, piece in self._mapped.items():
            if begin <= address and address + nbytes <= begin + len(piece):
                return begin, piece
        raise ConformanceError(f"nothing backs {address:#x}: a kernel would fail there")

    def _require_whole(self, *values: int) -> None:
        if any(value % self._granularity_bytes for value in values):
            raise ConformanceError(f"sizes and addresses are multiples of {self._granularity_bytes}")
