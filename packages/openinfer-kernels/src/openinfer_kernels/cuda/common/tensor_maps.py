"""Tensor maps: how the copy engine of Hopper is told where an array lies and how to cut boxes out of it."""

import ctypes
from typing import Any, NamedTuple

from openinfer_kernels.cuda.common.launch import check
from openinfer_kernels.cuda.common.libraries import driver

_MOST_KEPT = 4096
_NARROW = 16
"""Values of 32 bytes."""


class TensorBox(NamedTuple):
    """Boxes of a BF16 array; axes from the fastest, in values; zeros beyond the array.

    They are swizzled by the bytes of their rows: 32 for rows of 16 values, else 128.
    """

    address: int
    """A multiple of 16."""
    sizes: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    """Of all axes but the first; multiples of 16."""
    box: tuple[int, ...]


class TensorMap(ctypes.Structure):
    """`CUtensorMap`, an argument of a kernel."""

    _fields_ = (("words", ctypes.c_uint64 * 16),)


class TensorMaps:
    """Maps by what they say: one holds an address and no reference, so it serves whatever array is there."""

    def __init__(self) -> None:
        self._maps: dict[TensorBox, TensorMap] = {}

    def of(self, tensor: TensorBox) -> TensorMap:
        """The map of such boxes; making one takes some microseconds, so they are kept, up to a number of them."""
        found = self._maps.get(tensor)
        if found is None:
            if len(self._maps) >= _MOST_KEPT:
                # Addresses of activations come and go: a map that is needed again is made again.
                self._maps.clear()
            found = self._maps[tensor] = _encoded(tensor)
        return found


def _encoded(tensor: TensorBox) -> TensorMap:
    swizzles = driver.CUtensorMapSwizzle
    is_narrow = tensor.box[0] == _NARROW
    result: Any = check(
        driver.cuTensorMapEncodeTiled(
            driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            len(tensor.sizes),
            tensor.address,
            [driver.cuuint64_t(size) for size in tensor.sizes],
            [driver.cuuint64_t(stride) for stride in tensor.strides_bytes],
            [driver.cuuint32_t(size) for size in tensor.box],
            [driver.cuuint32_t(1)] * len(tensor.sizes),
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzles.CU_TENSOR_MAP_SWIZZLE_32B if is_narrow else swizzles.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return TensorMap.from_buffer_copy(ctypes.string_at(int(result.getPtr()), ctypes.sizeof(TensorMap)))
