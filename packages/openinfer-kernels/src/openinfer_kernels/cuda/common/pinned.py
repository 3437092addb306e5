"""Pinned host memory of steps in flight: copies to and from the device that no step waits for.

Small ones are made by a kernel (`csrc/sampling/steps.cu`), so that a step does not wait for the copy engines, which may
be busy with KV blocks; the device reaches pinned memory by its address on the host.
"""

import ctypes
from typing import Any

import numpy as np

from openinfer_kernels.cuda.common.arrays import address
from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.cuda.common.graphs import Event
from openinfer_kernels.cuda.common.libraries import cupy
from openinfer_kernels.ops import Array, HostArray

_TO_DEVICE, _TO_HOST = 1, 2
"""`cudaMemcpyKind`."""
_ALIGNMENT = 16
_FIRST_BYTES = 1 << 18
_SMALL_BYTES = 1 << 16
"""Of a copy that a kernel makes, at most; a copy engine is faster with more."""
_VECTOR_BYTES, _WARP, _MAX_THREADS = 16, 32, 1024


class _Copies:
    """Copies in order with CuPy's current stream, either way."""

    def __init__(self, device: Device) -> None:
        self._kernel = device.kernel("steps", "small_copy")

    def copy(self, target: int, source: int, nbytes: int, kind: int) -> None:
        if nbytes > _SMALL_BYTES:
            cupy.cuda.runtime.memcpyAsync(target, source, nbytes, kind, cupy.cuda.get_current_stream().ptr)
        elif nbytes:
            threads = min(_MAX_THREADS, -(-nbytes // (_VECTOR_BYTES * _WARP)) * _WARP)
            arguments = [ctypes.c_void_p(source), ctypes.c_void_p(target), ctypes.c_int(nbytes)]
            self._kernel((1, 1, 1), (threads, 1, 1), arguments)


class StagingBuffer:
    """Host memory of one step, and the event after its last copy."""

    def __init__(self, copies: _Copies) -> None:
        self.done = Event()
        self._copies = copies
        self._buffers = [_pinned(_FIRST_BYTES)]
        self._used = 0

    def take(self, nbytes: int) -> HostArray:
        """`[nbytes]` uint8 that stays as it is until the ring comes round to this buffer again."""
        buffer, begin = self._buffers[-1], self._used
        if begin + nbytes > buffer.size:
            buffer, begin = _pinned(max(2 * buffer.size, nbytes)), 0
            self._buffers.append(buffer)
        self._used = begin + _aligned(nbytes)
        return buffer[begin : begin + nbytes]

    def upload(self, *hosts: HostArray) -> list[Array]:
        """Copies of host arrays, brought over together."""
        offsets = np.cumsum([0, *(_aligned(host.nbytes) for host in hosts)]).tolist()
        staged, target = self.take(offsets[-1]), cupy.empty(offsets[-1], np.uint8)
        for host, begin in zip(hosts, offsets, strict=False):
            staged[begin : begin + host.nbytes] = np.ascontiguousarray(host).reshape(-1).view(np.uint8)
        self._send(staged, target)
        return [
            target[begin : begin + host.nbytes].view(host.dtype).reshape(host.shape)
            for host, begin in zip(hosts, offsets, strict=False)
        ]

    def upload_into(self, host: HostArray, target: Array) -> None:
        staged = self.take(host.nbytes)
        staged[:] = np.ascontiguousarray(host).reshape(-1).view(np.uint8)
        self._send(staged, target)

    def download(self, source: Array) -> HostArray:
        """Begins to copy a device array; what is returned holds it once `done` has passed."""
        staged = self.take(source.nbytes)
        self._copies.copy(staged.ctypes.data, address(source), source.nbytes, _TO_HOST)
        return staged.view(source.dtype).reshape(source.shape)

    def _send(self, staged: HostArray, target: Array) -> None:
        self._copies.copy(address(target), staged.ctypes.data, staged.nbytes, _TO_DEVICE)

    def begin(self) -> None:
        """Waits for the last step that used it, and forgets what that left; the largest buffer is kept."""
        self.done.wait()
        # The largest is kept, so that a step like the last one needs one buffer.
        self._buffers = [max(self._buffers, key=len)]
        self._used = 0


class StagingRing:
    """Staging buffers that steps take one after the other.

    Args:
        device: that copies go to and come from.
        buffers: steps whose host memory is in use at a time, at most.
    """

    def __init__(self, device: Device, buffers: int) -> None:
        copies = _Copies(device)
        self._ring = [StagingBuffer(copies) for _ in range(buffers)]
        self._next = 0

    def take(self) -> StagingBuffer:
        buffer = self._ring[self._next]
        self._next = (self._next + 1) % len(self._ring)
        buffer.begin()
        return buffer


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _pinned(nbytes: int) -> HostArray:
    memory: Any = cupy.cuda.alloc_pinned_memory(nbytes)
    return np.frombuffer(memory, np.uint8, nbytes)
