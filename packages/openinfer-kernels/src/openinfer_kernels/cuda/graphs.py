"""Streams, graphs, events and pinned buffers: what a runner needs to queue steps without waiting for them."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from openinfer_kernels.cuda.arrays import address
from openinfer_kernels.cuda.device import Device
from openinfer_kernels.cuda.libraries import cupy
from openinfer_kernels.ops import Array, HostArray

_TO_DEVICE, _TO_HOST = 1, 2
"""`cudaMemcpyKind`."""


class Event:
    """A point of a stream that the host can wait for."""

    def __init__(self) -> None:
        self._event = cupy.cuda.Event(block=False, disable_timing=True)

    def record(self) -> None:
        """Marks the current stream's present end."""
        self._event.record()

    def wait(self) -> None:
        """Returns once the device has passed it; at once if it was never recorded."""
        self._event.synchronize()


class Graph:
    """A captured step."""

    def __init__(self, graph: Any, stream: Any) -> None:
        self._graph = graph
        self._stream = stream

    def launch(self) -> None:
        """Queues it on the stream that it was captured on."""
        self._graph.launch(self._stream)


class Stream:
    """The stream of one rank. As a context manager it is the current stream of the thread, on its device."""

    def __init__(self, device: Device) -> None:
        self._device = device
        device.use()
        self._stream = cupy.cuda.Stream(non_blocking=True)

    def __enter__(self) -> Self:
        self._device.use()
        self._stream.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stream.__exit__(*exception)

    def synchronize(self) -> None:
        """Waits for everything that was queued."""
        self._stream.synchronize()

    def private_pool(self) -> AbstractContextManager[None]:
        """Within it, arrays come from memory that nothing else uses: what graphs work in, for as long as they live."""
        pool = cupy.cuda.MemoryPool()
        return _Allocator(pool)

    def capture(self, work: Callable[[], Array]) -> tuple[Graph, Array]:
        """Captures what `work` queues; returns the graph and the array that `work` returned."""
        self._stream.begin_capture()
        try:
            result = work()
        finally:
            captured = self._stream.end_capture()
        return Graph(captured, self._stream), result


class _Allocator(AbstractContextManager[None]):
    """May be entered again and again."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._using: Any = None

    def __enter__(self) -> None:
        self._using = cupy.cuda.using_allocator(self._pool.malloc)
        self._using.__enter__()

    def __exit__(self, *exception: object) -> None:
        self._using.__exit__(*exception)


@dataclass(frozen=True, slots=True)
class PinnedTurn:
    """Host buffers of one step."""

    inputs: HostArray
    outputs: HostArray
    done: Event

    def upload(self, target: Array) -> None:
        """Copies the first values of `inputs` into a device array, without waiting."""
        stream = cupy.cuda.get_current_stream().ptr
        cupy.cuda.runtime.memcpyAsync(address(target), self.inputs.ctypes.data, target.nbytes, _TO_DEVICE, stream)

    def download(self, source: Array) -> None:
        """Copies a device array into the first values of `outputs`, without waiting, and marks the end."""
        stream = cupy.cuda.get_current_stream().ptr
        cupy.cuda.runtime.memcpyAsync(self.outputs.ctypes.data, address(source), source.nbytes, _TO_HOST, stream)
        self.done.record()


class PinnedBuffers:
    """Host buffers that steps take in turns; int32, in memory that the device copies from and to by itself.

    Args:
        turns: steps in flight at most.
        inputs: values that a step sends.
        outputs: values that a step brings back.
    """

    def __init__(self, turns: int, *, inputs: int, outputs: int) -> None:
        self._turns = [PinnedTurn(_pinned(inputs), _pinned(outputs), Event()) for _ in range(turns)]
        self._next = 0

    def take(self) -> PinnedTurn:
        """The next buffers, once their last step is over."""
        turn = self._turns[self._next]
        self._next = (self._next + 1) % len(self._turns)
        turn.done.wait()
        return turn


def _pinned(count: int) -> HostArray:
    memory = cupy.cuda.alloc_pinned_memory(count * 4)
    return np.frombuffer(memory, np.int32, count)
