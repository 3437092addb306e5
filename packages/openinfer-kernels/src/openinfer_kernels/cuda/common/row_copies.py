"""`RowCopies`: copies of some rows of an array, kept beside it until they are brought back or made anew."""

from collections.abc import Sequence

from openinfer_kernels.cuda.common.arrays import address
from openinfer_kernels.cuda.common.libraries import cupy
from openinfer_kernels.ops import Array

_ON_DEVICE = 3
"""`cudaMemcpyDeviceToDevice`."""


class RowCopies:
    """Copies are queued on CuPy's current stream.

    Args:
        array: `[rows, ...]`.
        most: rows that are copied at a time, at most.
    """

    def __init__(self, array: Array, *, most: int) -> None:
        self._array = array
        self._copies = cupy.zeros((most, *array.shape[1:]), array.dtype)
        self._places: dict[int, int] = {}

    def save(self, rows: Sequence[int]) -> None:
        """Copies rows as they are now; what was copied before is void."""
        self._places = {row: place for place, row in enumerate(rows)}
        for row, place in self._places.items():
            _copy(self._array[row], self._copies[place])

    def restore(self, rows: Sequence[int]) -> None:
        """Gives rows that were saved their contents back."""
        for row in rows:
            _copy(self._copies[self._places[row]], self._array[row])


def _copy(source: Array, target: Array) -> None:
    stream = cupy.cuda.get_current_stream().ptr
    cupy.cuda.runtime.memcpyAsync(address(target), address(source), source.nbytes, _ON_DEVICE, stream)
