"""How a group over NCCL ends, with a stand-in for the library: the script that `test_nccl_ends.py` runs."""

import os
import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import emulated_cuda
import numpy as np

emulated_cuda.install()
pathfinder: Any = ModuleType("cuda.pathfinder")
pathfinder.DynamicLibNotFoundError, pathfinder.load_nvidia_dynamic_lib = OSError, None  # no library is opened
sys.modules["cuda.pathfinder"] = pathfinder

from openinfer_engine.cuda.worker import CudaWorker  # noqa: E402 - after the stand-ins
from openinfer_engine.distributed import nccl_communicator, nccl_peers  # noqa: E402
from openinfer_engine.distributed.nccl_peers import connect_peers  # noqa: E402
from openinfer_kernels import CudaCallError, DeviceUnavailableError  # noqa: E402
from openinfer_kernels.cuda.comm import nccl, peer_buffers  # noqa: E402
from openinfer_kernels.cuda.comm.expert_rows import ExpertRows  # noqa: E402
from openinfer_kernels.cuda.comm.nccl import NcclGroup  # noqa: E402
from openinfer_kernels.cuda.comm.peer_buffers import PeerBuffers  # noqa: E402
from openinfer_kernels.cuda.common.graphs import Stream  # noqa: E402


def calls_within_a_group_that_raise_end_it() -> None:
    called: list[str] = []
    group: Any = NcclGroup.__new__(NcclGroup)
    vars(group)["_library"] = SimpleNamespace(
        ncclGroupStart=lambda: called.append("start") or 0, ncclGroupEnd=lambda: called.append("end") or 0
    )
    try:
        with group.together():
            raise OSError("a call within it was refused")
    except OSError:
        pass
    assert called == ["start", "end"], called
    with group.together():
        pass
    assert called == ["start", "end"] * 2, called


def arrays_are_registered_by_all_ranks_or_by_none() -> None:
    """NCCL reads its settings once a process: it cannot be told later what other ranks, which are new, are told."""
    loaded = SimpleNamespace(cache_info=lambda: SimpleNamespace(currsize=1))
    with patch.dict(os.environ), patch.object(nccl, "library", loaded):
        for name in ("NCCL_GRAPH_REGISTER", "NCCL_LOCAL_REGISTER"):
            os.environ.pop(name, None)
        try:
            nccl.register_no_buffers()
        except DeviceUnavailableError as refused:
            assert "a process of its own" in str(refused)  # noqa: PT017 - a script
        else:
            raise AssertionError("the library registers already")
        loaded.cache_info = lambda: SimpleNamespace(currsize=0)
        nccl.register_no_buffers()
        assert os.environ["NCCL_GRAPH_REGISTER"] == os.environ["NCCL_LOCAL_REGISTER"] == "0"
        loaded.cache_info = lambda: SimpleNamespace(currsize=1)
        nccl.register_no_buffers()


class SlowGroup:
    """A group that is formed when it may be, and notes its end."""

    may_be_formed = threading.Event()
    aborted = threading.Event()

    def __init__(self, group_id: bytes, *, rank: int, size: int) -> None:
        self.may_be_formed.wait(60)

    def take_abort(self) -> Any:
        return self.aborted.set


def a_group_that_is_broken_while_it_is_formed_is_ended_before_close_returns() -> None:
    module: Any = nccl_communicator
    module.NcclGroup, module.RankArrays, module.ExactSums = SlowGroup, lambda _: None, lambda *_, **__: None
    module.open_expert_rows = lambda *_, **__: None
    device: Any = SimpleNamespace(use=lambda: None)
    with patch.object(module.NcclCommunicator, "_warm_up", lambda *_: None):
        made = module.NcclCommunicator(b"", rank=0, size=2, device=device, nodes=(0, 0), deals_experts=True)
        made.abort(RuntimeError("another rank has failed"))
        threading.Timer(0.2, SlowGroup.may_be_formed.set).start()
        made.close()
    assert SlowGroup.aborted.is_set()
    assert not [each for each in threading.enumerate() if each.name == "openinfer-join"]


def a_worker_whose_device_has_failed_frees_its_graphs_and_leaves_the_group() -> None:
    def fail() -> None:
        raise RuntimeError("an illegal address")

    ended: list[str] = []
    graphs = {name: SimpleNamespace(clear=lambda name=name: ended.append(name)) for name in "abcde"}
    worker: Any = CudaWorker.__new__(CudaWorker)
    vars(worker).update(
        _stream=SimpleNamespace(synchronize=fail, free_graphs=lambda: ended.append("freed")),
        _decode=graphs["a"],
        _adapted_decode=graphs["b"],
        _mixed=SimpleNamespace(captured=graphs["c"], adapted=graphs["d"]),
        _drafted=SimpleNamespace(graphs=graphs["e"]),
        _sleeping_memory=None,
        _communicator=SimpleNamespace(close=lambda: ended.append("group")),
    )
    try:
        worker.close()
    except RuntimeError:
        ended.append("said")
    assert sorted(ended[:5]) == [*"abcde"], ended
    assert ended[5:] == ["freed", "group", "said"], ended


class RanksOfThreads:
    """A stand-in for a group over NCCL, whose ranks are threads: a call fails that not all of them make."""

    def __init__(self, size: int) -> None:
        self._given: list[Any] = [None] * size
        self._all = threading.Barrier(size, timeout=20)
        self.called: list[list[str]] = [[] for _ in range(size)]

    def of(self, rank: int) -> Any:
        return SimpleNamespace(all_gather=partial(self._gather, rank), all_reduce=partial(self._reduce, rank))

    def _gather(self, rank: int, array: Any, gathered: Any) -> None:
        gathered[...] = self._of_all("gather", rank, array)

    def _reduce(self, rank: int, array: Any, out: Any) -> None:
        out[...] = sum(self._of_all("reduce", rank, array))

    def _of_all(self, name: str, rank: int, array: Any) -> list[Any]:
        self.called[rank].append(name)
        self._given[rank] = np.array(array)
        self._all.wait()
        given = [*self._given]
        self._all.wait()
        return given


class Peer:
    """A rank's end of kernels, whose handle is its number."""

    def __init__(self, rank: int, *, fails: str) -> None:
        if fails == "memory":
            raise MemoryError("out of memory")
        self._rank, self._fails, self.handles, self.is_closed = rank, fails, [], False

    @property
    def handle(self) -> bytes:
        if self._fails == "handle":
            raise CUDARuntimeError("no handles here")
        return bytes([self._rank + 1]) * 4

    def connect(self, handles: Any) -> None:
        if self._fails == "connect":
            raise CudaCallError("out of reach")
        assert all(map(any, handles)), "the handle of a rank that has no memory"
        self.handles = handles

    def close(self) -> None:
        self.is_closed = True


class CUDARuntimeError(RuntimeError):
    """CuPy's."""


def a_rank_without_memory_leaves_no_other_waiting(fails: str) -> None:
    made: dict[int, Peer] = {}
    got: dict[int, Any] = {}
    group = RanksOfThreads(3)

    def make(rank: int) -> Peer:
        made[rank] = Peer(rank, fails=fails if rank == 1 else "")
        return made[rank]

    def connect(rank: int) -> None:
        made_here, sizes = partial(make, rank), {"rank": rank, "size": 3, "handle_bytes": 4}
        got[rank] = connect_peers(group.of(rank), made_here, **sizes, otherwise="they go through NCCL")

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(3)]
    runtime = SimpleNamespace(**vars(nccl_peers.cupy.cuda.runtime), CUDARuntimeError=CUDARuntimeError)
    with patch.object(nccl_peers.cupy.cuda, "runtime", runtime):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert group.called == [["gather", "reduce"]] * 3, group.called
    assert set(got.values()) == ({None} if fails else set(made.values())), got
    assert [each.is_closed for each in made.values()] == [bool(fails)] * len(made)
    if not fails:
        assert all(each.handles == [bytes([rank]) * 4 for rank in (1, 2, 3)] for each in made.values())


class RuntimeMemory:
    """What the runtime hands out next to CuPy's pool, and takes back only when it is freed."""

    def __init__(self, *, allocations: int) -> None:
        self._most, self.held = allocations, list[int]()

    def malloc(self, num_bytes: int) -> int:
        if len(self.held) == self._most:
            raise CUDARuntimeError("out of memory")
        self.held.append(num_bytes)
        return num_bytes

    def free(self, pointer: int) -> None:
        self.held.remove(pointer)


def memory_of_an_end_that_cannot_be_made_is_freed(make: Callable[[], Any], *, allocations: int, filled: int) -> None:
    """So `connect_peers` has nothing to close where `make` raises; `filled` allocations can be filled."""
    memory, fills = RuntimeMemory(allocations=allocations), iter(range(filled))

    def fill(*_: Any) -> None:
        if next(fills, None) is None:
            raise CUDARuntimeError("the device has failed")

    with (
        patch.object(peer_buffers.cupy.cuda, "runtime", memory),
        patch.object(peer_buffers, "driver", SimpleNamespace(cuMemsetD32Async=fill)),
        patch.object(peer_buffers, "check", lambda _: None),
    ):
        try:
            make()
        except CUDARuntimeError:
            assert not memory.held, f"{memory.held} bytes are held until the process ends"
        else:
            raise AssertionError("it is made without memory")


class Captured:
    """What a stream has captured."""


def graphs_are_freed_also_where_a_traceback_has_them() -> None:
    captured = [Captured(), Captured()]
    alive = [weakref.ref(each) for each in captured]
    stream: Any = Stream.__new__(Stream)
    queue = SimpleNamespace(begin_capture=lambda: None, end_capture=captured.pop)
    vars(stream).update(_graphs=weakref.WeakSet(), _stream=queue)
    kept, _ = stream.capture(lambda: None)
    stream.capture(lambda: None)
    assert [each() is None for each in alive] == [True, False]  # what is not held is gone
    stream.free_graphs()
    assert alive[1]() is None
    assert kept is not None


if __name__ == "__main__":
    calls_within_a_group_that_raise_end_it()
    arrays_are_registered_by_all_ranks_or_by_none()
    a_group_that_is_broken_while_it_is_formed_is_ended_before_close_returns()
    a_worker_whose_device_has_failed_frees_its_graphs_and_leaves_the_group()
    graphs_are_freed_also_where_a_traceback_has_them()
    for what in ("", "memory", "handle", "connect"):
        a_rank_without_memory_leaves_no_other_waiting(what)
    sizes = {"rank": 0, "size": 2}
    device: Any = SimpleNamespace(kernel=lambda *_: None)
    of_buffers, of_rows = partial(PeerBuffers, slot_bytes=16, **sizes), partial(ExpertRows, device, **sizes)
    memory_of_an_end_that_cannot_be_made_is_freed(of_buffers, allocations=0, filled=0)
    memory_of_an_end_that_cannot_be_made_is_freed(of_buffers, allocations=1, filled=0)
    memory_of_an_end_that_cannot_be_made_is_freed(of_rows, allocations=1, filled=1)
    memory_of_an_end_that_cannot_be_made_is_freed(of_rows, allocations=2, filled=1)
    sys.stdout.write("ended\n")
