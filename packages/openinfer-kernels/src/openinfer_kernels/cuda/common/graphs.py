"""Streams, graphs and events: what a runner needs to queue steps without waiting for them."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Self, TypeVar
from weakref import WeakSet

from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.cuda.common.libraries import cupy

Result = TypeVar("Result")


class Event:
    """A point of a stream that the host can wait for."""

    def __init__(self) -> None:
        self._event = cupy.cuda.Event(block=False, disable_timing=True)

    def record(self) -> None:
        self._event.record()

    def wait(self) -> None:
        """Returns once the device has passed it; at once if it was never recorded."""
        self._event.synchronize()


class Fence:
    """The present end of the current stream, which a thread can sleep until."""

    def __init__(self) -> None:
        self._event = cupy.cuda.Event(block=True, disable_timing=True)
        self._event.record()

    def wait(self) -> None:
        self._event.synchronize()


class Timer:
    """Times of points of the current stream, on the host's clock.

    Args:
        clock: monotonic seconds; read once, when the stream is empty.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._last = cupy.cuda.Event()
        self._last.record()
        self._last.synchronize()
        self._last_s = clock()

    def mark(self) -> Any:
        """Marks the stream's present end; `seconds` tells later when it was passed."""
        event = cupy.cuda.Event()
        event.record()
        return event

    def seconds(self, mark: Any) -> float:
        """When the device passed a mark, which it has; marks are asked about in their order.

        From mark to mark, since the time between two events is told in single precision.
        """
        self._last_s += cupy.cuda.get_elapsed_time(self._last, mark) * 1e-3
        self._last = mark
        return self._last_s


class Graph:
    """A captured step."""

    def __init__(self, graph: Any, stream: Any) -> None:
        self._graph: Any = graph
        self._stream = stream

    def launch(self) -> None:
        """Queues it on the stream that it was captured on."""
        self._graph.launch(self._stream)

    def free(self) -> None:
        """Lets go of what was captured, also while this object is held; it cannot be launched any more."""
        self._graph = None


class Stream:
    """The stream of one rank. As a context manager it is the current stream of the thread, on its device."""

    def __init__(self, device: Device) -> None:
        self._device = device
        device.use()
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._pools: list[Any] = []
        """Of graphs: a pool that is dropped frees what its graphs work in."""
        self._graphs: WeakSet[Graph] = WeakSet()

    def __enter__(self) -> Self:
        self._device.use()
        self._stream.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stream.__exit__(*exception)

    def synchronize(self) -> None:
        self._stream.synchronize()

    def private_pool(self, pool: Any = None) -> AbstractContextManager[None]:
        """Within it, arrays come from memory that nothing else uses while the stream lives: what graphs work in.

        Args:
            pool: of CuPy's, that has this memory; None: a new one.
        """
        pool = cupy.cuda.MemoryPool() if pool is None else pool
        self._pools.append(pool)
        return _Allocator(pool)

    def capture(self, work: Callable[[], Result]) -> tuple[Graph, Result]:
        """Captures what `work` queues; returns the graph and what `work` returned."""
        self._stream.begin_capture()
        try:
            result = work()
        finally:
            captured = self._stream.end_capture()
        graph = Graph(captured, self._stream)
        self._graphs.add(graph)
        return graph, result

    def free_graphs(self) -> None:
        """Frees all that were captured: a failed step's traceback may have them for longer than their group lasts."""
        for graph in list(self._graphs):
            graph.free()


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
