"""`IpcMemory`: memory of a GPU that another process has allocated, by its CUDA IPC handle, to be read alone."""

import numpy as np

from openinfer_kernels.cuda.common.arrays import address as address_of
from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.cuda.common.launch import check
from openinfer_kernels.cuda.common.libraries import cupy, driver
from openinfer_kernels.errors import CudaCallError
from openinfer_kernels.ops import Array, HostArray

_TO_HOST = 2
"""`cudaMemcpyDeviceToHost`."""
_ON_DEVICE = 3
"""`cudaMemcpyDeviceToDevice`, from one GPU to another, too."""
_HANDLE_BYTES = 64
"""`sizeof(cudaIpcMemHandle_t)`; CuPy copies as many bytes as it is given."""


class IpcMemory:
    """One allocation of `cudaMalloc`; it stays until `close`, though its process frees it or dies.

    Args:
        device: that reads it.
        handle: of `cudaIpcGetMemHandle`.

    Raises:
        CudaCallError: no process has such memory, or it is of this one.
    """

    def __init__(self, device: Device, handle: bytes) -> None:
        if len(handle) != _HANDLE_BYTES:
            raise CudaCallError(f"a CUDA IPC handle has {_HANDLE_BYTES} bytes, not {len(handle)}")
        self._device = device
        self.device_bytes = self.host_bytes = 0
        """That were copied on the GPU, and to the host."""
        device.use()
        try:
            address: int = cupy.cuda.runtime.ipcOpenMemHandle(handle)
        except cupy.cuda.runtime.CUDARuntimeError as error:
            raise CudaCallError(f"a CUDA IPC handle cannot be opened: {error}") from error
        self._address: int | None = address
        try:
            _, self.size_bytes = _allocation_of(address)
            """Of the allocation."""
        except CudaCallError:
            self.close()
            raise

    def read(self, offset_bytes: int, num_bytes: int) -> HostArray:
        """`[num_bytes]` uint8, copied to the host; waits for it.

        Raises:
            ValueError: they do not lie in the allocation, or it is closed.
        """
        begin = self._begin(offset_bytes, num_bytes)
        copied = np.empty(num_bytes, np.uint8)
        if num_bytes:
            self._device.use()
            cupy.cuda.runtime.memcpy(copied.ctypes.data, begin, num_bytes, _TO_HOST)
            self.host_bytes += num_bytes
        return copied

    def copy_rows(self, offset_bytes: int, pitch_bytes: int, out: Array) -> None:
        """As `ForeignMemory.copy_rows`."""
        rows, row_bytes = len(out), out[:1].nbytes
        if not out.nbytes:
            return
        if pitch_bytes < row_bytes or not out.flags.c_contiguous:
            raise ValueError(f"rows of {row_bytes} bytes do not lie {pitch_bytes} apart, or are written with gaps")
        begin, stream = self._begin(offset_bytes, (rows - 1) * pitch_bytes + row_bytes), cupy.cuda.get_current_stream()
        if pitch_bytes == row_bytes or rows == 1:
            cupy.cuda.runtime.memcpyAsync(address_of(out), begin, out.nbytes, _ON_DEVICE, stream.ptr)
        else:
            cupy.cuda.runtime.memcpy2DAsync(
                address_of(out), row_bytes, begin, pitch_bytes, row_bytes, rows, _ON_DEVICE, stream.ptr
            )
        self.device_bytes += out.nbytes

    def _begin(self, offset_bytes: int, num_bytes: int) -> int:
        """The address of bytes that lie in the allocation; `ValueError` if they do not, or if it is closed."""
        if self._address is None or not 0 <= offset_bytes <= offset_bytes + num_bytes <= self.size_bytes:
            raise ValueError(f"{num_bytes} bytes at {offset_bytes} are none of an open allocation of {self.size_bytes}")
        return self._address + offset_bytes

    def close(self) -> None:
        """As `ForeignMemory.close`."""
        address, self._address = self._address, None
        if address is not None:
            self._device.use()
            cupy.cuda.runtime.deviceSynchronize()  # a load that failed may have left copies under way
            cupy.cuda.runtime.ipcCloseMemHandle(address)


def _allocation_of(address: int) -> tuple[int, int]:
    """First address and bytes."""
    error, base, size_bytes = driver.cuMemGetAddressRange(address)
    check((error,))
    return int(base), int(size_bytes)
