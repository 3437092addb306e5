"""Copies between host and device, and weights in BF16.

All copies go in order with the kernels of CuPy's current stream. A host array may be reused as soon as a call returns:
the driver stages pageable memory before it does.
"""

import ctypes
from typing import Any

import numpy as np

from openinfer_kernels.cuda.arrays import address
from openinfer_kernels.cuda.device import Device
from openinfer_kernels.cuda.libraries import bfloat16, cupy
from openinfer_kernels.errors import WeightDtypeError
from openinfer_kernels.ops import Array, HostArray

_THREADS = 256
_PIECE_VALUES = 1 << 24
"""Values that are converted at once: bounds the memory beside the weight."""
_TO_DEVICE = 1
"""`cudaMemcpyHostToDevice`."""


class Memory:
    """The memory of one device."""

    def __init__(self, device: Device) -> None:
        self._conversions = {
            np.dtype(dtype): device.kernel("weights", f"weights_from_{np.dtype(dtype).name}")
            for dtype in (np.float32, np.float16)
        }

    def upload(self, host: HostArray) -> Array:
        """A copy of `host`, dtype unchanged."""
        contiguous = np.ascontiguousarray(host).reshape(host.shape)
        out = cupy.empty(host.shape, host.dtype)
        _copy(contiguous, out)
        return out

    def upload_weight(self, host: HostArray, /) -> Array:
        """A BF16 array of the same shape: BF16 bits are copied as they are, others converted on the device.

        Raises:
            WeightDtypeError: not float32, float16, or uint16 for BF16 bits.
        """
        if host.dtype == np.uint16:
            return self.upload(host.view(bfloat16))
        if host.dtype not in self._conversions:
            raise WeightDtypeError(
                f"a weight of dtype {host.dtype} was uploaded; possible are float32, float16, and uint16 for BF16 bits"
            )
        out = cupy.empty(host.shape, bfloat16)
        values, converted = np.ascontiguousarray(host).reshape(-1), out.reshape(-1)
        for start in range(0, values.size, _PIECE_VALUES):
            self._convert(values[start : start + _PIECE_VALUES], converted[start : start + _PIECE_VALUES])
        return out

    def download(self, array: Array) -> HostArray:
        """A copy in host memory, after everything before it on the stream; BF16 arrives as `ml_dtypes.bfloat16`."""
        return cupy.asnumpy(array)

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any] | type[Any] | None = None) -> Array:
        """Zeros, BF16 unless said otherwise."""
        return cupy.zeros(shape, bfloat16 if dtype is None else dtype)

    def _convert(self, host: HostArray, out: Array) -> None:
        staged = self.upload(host)
        grid = (-(-host.size // _THREADS), 1, 1)
        arguments = [staged, out, ctypes.c_int64(host.size)]
        self._conversions[host.dtype](grid, (_THREADS, 1, 1), arguments)


def _copy(host: HostArray, out: Array) -> None:
    if host.nbytes:
        stream = cupy.cuda.get_current_stream().ptr
        cupy.cuda.runtime.memcpyAsync(address(out), host.ctypes.data, host.nbytes, _TO_DEVICE, stream)
