"""What operators ask of the arrays they are handed. A kernel sees bare pointers: this is the last place to look."""

from typing import Any

import numpy as np

from openinfer_kernels.cuda.common.libraries import bfloat16, cupy
from openinfer_kernels.errors import ArrayMismatchError
from openinfer_kernels.ops import Array

VECTOR_BYTES = 16
"""The widest access of a thread; a pointer is fit for it at multiples of this."""
_FLOAT32 = np.dtype(np.float32)


def require(array: Array, dtype: np.dtype[Any], *, ndim: int, what: str) -> None:
    """Refuses an array that is not on the device, not of `dtype` and `ndim`, or not contiguous."""
    if (
        not isinstance(array, cupy.ndarray)
        or array.dtype != dtype
        or array.ndim != ndim
        or not array.flags.c_contiguous
    ):
        raise ArrayMismatchError(
            f"{what} must be a contiguous array of {dtype.name} with {ndim} axes on the GPU, not {_described(array)}"
        )


def require_floats(array: Array, *, ndim: int, what: str) -> np.dtype[Any]:
    dtype = _FLOAT32 if getattr(array, "dtype", None) == _FLOAT32 else bfloat16
    require(array, dtype, ndim=ndim, what=what)
    return dtype


def require_rows(array: Array, dtype: np.dtype[Any], *, what: str) -> None:
    """Refuses a matrix off the device, of another dtype, or with gaps inside its rows; rows may lie apart."""
    is_there = isinstance(array, cupy.ndarray) and array.dtype == dtype and array.ndim == 2
    if not is_there or (array.shape[1] > 1 and array.strides[1] != dtype.itemsize):
        raise ArrayMismatchError(
            f"{what} must be a matrix of {dtype.name} with contiguous rows on the GPU, not {_described(array)}"
        )


def row_stride(array: Array) -> int:
    """Values from one row of a matrix to the next."""
    return array.strides[0] // array.dtype.itemsize


def address(array: Any) -> int:
    return array.data.ptr


def fits_vectors(*arrays: Array) -> bool:
    """Whether each array begins at a multiple of 16 bytes, as every one does that is not cut out of another."""
    return not any(address(array) % VECTOR_BYTES for array in arrays)


def rows_fit_vectors(*arrays: Array) -> bool:
    """Whether each row of each matrix begins at a multiple of 16 bytes."""
    return fits_vectors(*arrays) and not any(array.strides[0] % VECTOR_BYTES for array in arrays)


def _described(array: Any) -> str:
    if not isinstance(array, cupy.ndarray):
        return f"{type(array).__module__}.{type(array).__qualname__}"
    layout = "contiguous" if array.flags.c_contiguous else f"strides of {array.strides} bytes"
    return f"{array.dtype.name} of shape {array.shape}, {layout}"
