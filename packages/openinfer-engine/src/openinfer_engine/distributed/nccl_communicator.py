"""`NcclCommunicator`: one GPU's end of a group of processes, over NCCL.

Everything runs on CuPy's current stream, in the order in which it is called, and may be captured; a group is joined
while what follows its making runs, and its first collective waits for that. `abort` may be called while another thread
waits for the device: what runs there is ended. Sums: `nccl_sums.py`.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np

from openinfer_engine.distributed.communicator import check_axis, check_pieces, check_root
from openinfer_engine.distributed.nccl_expert_rows import open_expert_rows
from openinfer_engine.distributed.nccl_sums import ExactSums, open_one_shot
from openinfer_engine.errors import GroupBroken
from openinfer_kernels import Array, KernelsError
from openinfer_kernels.cuda.comm.expert_rows import ExpertRows
from openinfer_kernels.cuda.comm.nccl import NcclGroup
from openinfer_kernels.cuda.comm.one_shot import OneShot
from openinfer_kernels.cuda.comm.rank_arrays import RankArrays
from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.cuda.common.libraries import bfloat16, cupy

logger = logging.getLogger("openinfer.engine")

# of the first collectives: NCCL connects ranks when it first uses a way between them, which depends on the size
_WARM_VALUES = (1 << 11, 1 << 16, 1 << 20, 1 << 23)
_END_DEADLINE_S = 5.0  # what ending a broken group, or one that is being formed, may take of a close
_CALL_DEADLINE_S = 1.0  # what a call that is being made may take until it is aborted all the same


@dataclass(frozen=True, slots=True)
class _Joined:
    """A group that was formed."""

    group: NcclGroup
    arrays: RankArrays
    sums: ExactSums
    one_shot: OneShot | None  # what sums small arrays
    expert_rows: ExpertRows | None  # what brings rows to other ranks' experts, and back


class NcclCommunicator:
    """One rank of a group.

    Args:
        group_id: of the group, as all ranks have it.
        rank: this one.
        size: of the group.
        device: of this rank.
        nodes: of each rank.
        deals_experts: whether ranks bring rows to each other's experts, and so add up no rows of their own.
    """

    def __init__(
        self,
        group_id: bytes,
        *,
        rank: int,
        size: int,
        device: Device,
        nodes: Sequence[int],
        deals_experts: bool = False,
    ) -> None:
        self._nodes = tuple(nodes)
        self._deals_experts = deals_experts
        self._maps_memory = len(set(self._nodes)) == 1
        self._rank = rank
        self._size = size
        self._device = device
        self._changed = threading.Condition()
        self._calling = threading.RLock()
        self._joined: _Joined | None = None
        self._broken: GroupBroken | None = None
        self._ending: threading.Thread | None = None
        self._joining = threading.Thread(target=self._join, args=(group_id,), name="openinfer-join", daemon=True)
        self._joining.start()

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    def all_reduce(self, array: Array) -> Array:
        """The sum over all ranks, in the array's memory; BF16, float32, or integers."""
        with self._collective() as joined:
            if joined.one_shot is not None and joined.one_shot.fits(array):
                joined.one_shot.all_reduce(array)
            else:
                joined.sums.all_reduce(array)
        return array

    def all_gather(self, array: Array, *, axis: int) -> Array:
        check_axis(array, axis)
        axis %= array.ndim
        before, after = array.shape[:axis], array.shape[axis:]
        gathered = cupy.empty((self._size, *array.shape), array.dtype)
        with self._collective() as joined:
            joined.group.all_gather(array, gathered)
        if int(np.prod(before)) > 1:
            gathered = joined.arrays.exchange_axes(gathered.reshape(self._size, int(np.prod(before)), *after))
        return gathered.reshape(*before, self._size * after[0], *after[1:])

    def reduce_scatter(self, array: Array, *, axis: int) -> Array:
        """This rank's piece of the sum, a new array; BF16 or float32."""
        check_axis(array, axis, pieces=self._size)
        axis %= array.ndim
        before, after = array.shape[:axis], (array.shape[axis] // self._size, *array.shape[axis + 1 :])
        rows = int(np.prod(before))
        pieces = array.reshape(rows, self._size, *after)
        out = cupy.empty((*before, *after), array.dtype)
        with self._collective() as joined:
            if rows > 1:
                pieces = joined.arrays.exchange_axes(pieces)
            pieces = pieces.reshape(self._size, *before, *after)
            received = cupy.empty_like(pieces)
            joined.group.exchange(pieces, received)
            joined.sums.sum(received, out)
        return out

    def all_to_all(self, array: Array) -> Array:
        check_pieces(array, self._size)
        received = cupy.empty_like(array)
        with self._collective() as joined:
            joined.group.exchange(array, received)
        return received

    @contextlib.contextmanager
    def together(self) -> Generator[None]:
        with self._collective() as joined, joined.group.together():
            yield

    @contextlib.contextmanager
    def row_exchange(self) -> Generator[ExpertRows | None]:
        with self._collective() as joined:
            yield joined.expert_rows

    def broadcast(self, array: Array, *, root: int) -> Array:
        check_root(root, self._size)
        with self._collective() as joined:
            joined.group.broadcast(array, root=root)
        return array

    def barrier(self) -> None:
        self.all_reduce(cupy.zeros(1, np.int32))
        cupy.cuda.get_current_stream().synchronize()
        self._check()

    def abort(self, error: BaseException) -> None:
        """Breaks the group; collectives that run on the device end, with no result."""
        self._break(GroupBroken(f"the group of {self._size} ranks is broken: {error}"))

    def close(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._joined is not None or self._broken is not None)
            joined, is_whole, ending = self._joined, self._broken is None, self._ending
            self._broken = self._broken or GroupBroken(f"rank {self._rank} has closed its end")
        # A broken group is ended by `_end`, with its memory, or by the thread that was still forming it. An interpreter
        # that ends meanwhile takes NCCL's library away beneath them.
        until_s = time.monotonic() + _END_DEADLINE_S
        for thread in (self._joining, ending):
            if thread is not None:
                thread.join(max(0.0, until_s - time.monotonic()))
        if joined is not None and is_whole:
            for each in (joined.one_shot, joined.expert_rows):
                if each is not None:
                    each.close()
            joined.group.close()

    # --- the group --------------------------------------------------------------------------------------

    def _join(self, group_id: bytes) -> None:
        try:
            self._device.use()
            group = NcclGroup(group_id, rank=self._rank, size=self._size)
            arrays = RankArrays(self._device)  # here, as the thread that makes a communicator may have another device
            self._warm_up(group)
            sizes = {"rank": self._rank, "size": self._size}
            one_shot, expert_rows = None, None
            if self._maps_memory and self._deals_experts:
                expert_rows = open_expert_rows(group, self._device, **sizes)
            elif self._maps_memory:
                one_shot = open_one_shot(group, self._device, **sizes)
        except Exception as error:  # a thread that waits for this one must hear of it, whatever it is
            logger.exception("rank %d cannot join", self._rank)
            self._break(GroupBroken(f"rank {self._rank} cannot join: {type(error).__name__}: {error}"))
            return
        sums = ExactSums(group, arrays, rank=self._rank, size=self._size, nodes=self._nodes)
        with self._changed:
            self._joined = _Joined(group, arrays, sums, one_shot, expert_rows)
            is_broken = self._broken is not None
            self._changed.notify_all()
        # It was broken while it was formed, when `_break` had nothing to abort.
        if is_broken:
            group.take_abort()()

    def _warm_up(self, group: NcclGroup) -> None:
        """Calls each of NCCL's functions in each range of sizes."""
        with cupy.cuda.Stream(non_blocking=True) as stream:
            for values in _WARM_VALUES:
                array = cupy.empty((self._size, values // self._size), bfloat16)
                received = cupy.empty_like(array)
                group.all_reduce(array, array)
                group.broadcast(array, root=0)
                group.exchange(array, received)
                group.all_gather(array[self._rank], received)
            stream.synchronize()

    @contextlib.contextmanager
    def _collective(self) -> Generator[_Joined]:
        # Once joined it stays so: a collective takes the condition only while the group is formed.
        if self._joined is None:
            with self._changed:
                self._changed.wait_for(lambda: self._joined is not None or self._broken is not None)
        # An abort waits for the call that is being made, `_CALL_DEADLINE_S` at most.
        with self._calling:
            self._check()
            if self._joined is None:
                raise GroupBroken("the group was never joined")
            try:
                yield self._joined
            # In an aborted group calls fail with NCCL's own message: what broke the group is raised in its place.
            except KernelsError:
                self._check()
                raise

    def _check(self) -> None:
        if self._broken is not None:
            raise GroupBroken(str(self._broken)) from self._broken

    def _break(self, error: GroupBroken) -> None:
        with self._changed:
            if self._broken is not None:
                return
            self._broken = error
            if (joined := self._joined) is not None:
                for each in (joined.one_shot, joined.expert_rows):
                    if each is not None:
                        each.abort()
                # In a thread of its own: `abort` must never block, and `_end` waits for a call.
                ending = threading.Thread(target=self._end, args=(joined.group,), name="openinfer-abort", daemon=True)
                ending.start()
                self._ending = ending
            self._changed.notify_all()

    def _end(self, group: NcclGroup) -> None:
        has_lock = self._calling.acquire(timeout=_CALL_DEADLINE_S)
        try:
            abort = group.take_abort()
        finally:
            if has_lock:
                self._calling.release()
        abort()
