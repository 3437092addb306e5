"""What operators ask of the arrays they are handed. A kernel sees bare pointers: this is the last place to look."""

from typing import Any

import numpy as np

from openinfer_kernels.cuda.libraries import cupy
from openinfer_kernels.errors import ArrayMismatchError
from openinfer_kernels.ops import Array

VECTOR_BYTES = 16
"""The widest access of a thread; a pointer is fit for it at multiples of this."""


def require(array: Array, dtype: np.dtype[Any], *, ndim: int, what: str) -> None:
    """Refuses an array that is not on the device, not of `dtype` and `ndim`, or not contiguous.

    Raises:
        ArrayMismatchError: says which and what it is.
    """
    if (
        not isinstance(array, cupy.ndarray)
        or array.dtype != dtype
        or array.ndim != ndim
        or not array.flags.c_contiguous
    ):
        raise ArrayMismatchError(
            f"{what} must be a contiguous array of {dtype.name} with {ndim} axes on the GPU, not {_described(array)}"
        )


def address(array: Any) -> int:
    """Where a device array begins."""
    return array.data.ptr


def fits_vectors(*arrays: Array) -> bool:
    """Whether each array begins at a multiple of 16 bytes, as every one does that is not cut out of another."""
    return not any(address(array) % VECTOR_BYTES for array in arrays)


def _described(array: Any) -> str:
    if not isinstance(array, cupy.ndarray):
        return f"{type(array).__module__}.{type(array).__qualname__}"
    layout = "contiguous" if array.flags.c_contiguous else f"strides of {array.strides} bytes"
    return f"{array.dtype.name} of shape {array.shape}, {layout}"
