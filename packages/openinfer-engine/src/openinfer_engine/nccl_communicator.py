"""`NcclCommunicator`: one GPU's end of a group of processes, over NCCL.

NCCL adds up in the array's dtype, in an order of its own. Of two ranks that is one addition, rounded once, as the
contract has it. Of more, each rank takes a piece of every rank's array, adds the pieces up in float32 in order of
ranks, and all ranks gather the sums: as many bytes on the way as NCCL's own, and the same bits on every rank.

Everything runs on CuPy's current stream, in the order in which it is called, and may be captured; a group is joined
beside what follows its making, and its first collective waits for that. `abort` may be called while another thread
waits for the device: what runs there is ended.

Sums of the few rows of a decode step are made by one kernel of ours (`openinfer_kernels.cuda.one_shot`), where the GPUs
reach each other's memory; the log says where they do not.
"""

import contextlib
import logging
import threading
from collections.abc import Generator

import numpy as np

from openinfer_engine.communicator import check_axis, check_pieces, check_root
from openinfer_engine.errors import GroupBroken
from openinfer_kernels import Array, KernelsError
from openinfer_kernels.cuda.device import Device
from openinfer_kernels.cuda.libraries import bfloat16, cupy
from openinfer_kernels.cuda.nccl import NcclGroup
from openinfer_kernels.cuda.one_shot import HANDLE_BYTES, MAX_RANKS, OneShot
from openinfer_kernels.cuda.rank_arrays import RankArrays

logger = logging.getLogger("openinfer.engine")

_ONE_SHOT_BYTES = 1 << 19
"""Of an array that is summed by one kernel, at most: every rank sends it whole to every other."""
_GATHERED_BYTES = 1 << 19
"""Of all ranks' arrays together: up to here they are gathered whole, which is one exchange instead of two."""
_PIECE_VALUES = 8
"""Pieces of a sum begin at multiples of so many values, hence of 16 bytes."""
_WARM_VALUES = (1 << 11, 1 << 16, 1 << 20, 1 << 23)
"""Of the first collectives: NCCL connects ranks when it first uses a way between them, which depends on the size."""
_CALL_DEADLINE_S = 1.0
"""What a call that is being made may take until it is aborted all the same."""


class NcclCommunicator:
    """One rank of a group.

    Args:
        group_id: of `unique_id`, the same for all ranks.
        rank: this rank.
        size: ranks of the group, at least two.
        device: this rank's own.
    """

    def __init__(self, group_id: bytes, *, rank: int, size: int, device: Device) -> None:
        self._rank = rank
        self._size = size
        self._device = device
        self._arrays = RankArrays(device)
        self._changed = threading.Condition()
        self._calling = threading.Lock()
        self._group: NcclGroup | None = None
        self._one_shot: OneShot | None = None
        self._broken: GroupBroken | None = None
        threading.Thread(target=self._join, args=(group_id,), name="openinfer-join", daemon=True).start()

    @property
    def rank(self) -> int:
        """This rank."""
        return self._rank

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return self._size

    def all_reduce(self, array: Array) -> Array:
        """The sum over all ranks, in the array's memory; BF16, float32, or integers."""
        with self._collective() as group:
            if self._one_shot is not None and self._one_shot.fits(array):
                self._one_shot.all_reduce(array)
            elif self._size == 2 or array.dtype.kind in "iu":  # a sum of two is rounded once
                group.all_reduce(array, array)
            elif array.size % (self._size * _PIECE_VALUES) or array.nbytes * self._size <= _GATHERED_BYTES:
                self._gather_and_sum(group, array)
            else:
                self._sum_pieces(group, array)
        return array

    def all_gather(self, array: Array, *, axis: int) -> Array:
        """All ranks' arrays joined along `axis`, a new array."""
        check_axis(array, axis)
        axis %= array.ndim
        before, after = array.shape[:axis], array.shape[axis:]
        gathered = cupy.empty((self._size, *array.shape), array.dtype)
        with self._collective() as group:
            group.all_gather(array, gathered)
        if int(np.prod(before)) > 1:
            gathered = self._arrays.exchange_axes(gathered.reshape(self._size, int(np.prod(before)), *after))
        return gathered.reshape(*before, self._size * after[0], *after[1:])

    def reduce_scatter(self, array: Array, *, axis: int) -> Array:
        """This rank's piece of the sum, a new array; BF16 or float32."""
        check_axis(array, axis, pieces=self._size)
        axis %= array.ndim
        before, after = array.shape[:axis], (array.shape[axis] // self._size, *array.shape[axis + 1 :])
        rows = int(np.prod(before))
        pieces = array.reshape(rows, self._size, *after)
        if rows > 1:
            pieces = self._arrays.exchange_axes(pieces)
        pieces = pieces.reshape(self._size, *before, *after)
        received = cupy.empty_like(pieces)
        out = cupy.empty((*before, *after), array.dtype)
        with self._collective() as group:
            group.exchange(pieces, received)
            self._arrays.sum(received, out)
        return out

    def all_to_all(self, array: Array) -> Array:
        """Element `i` came from rank `i`, a new array."""
        check_pieces(array, self._size)
        received = cupy.empty_like(array)
        with self._collective() as group:
            group.exchange(array, received)
        return received

    def broadcast(self, array: Array, *, root: int) -> Array:
        """The array of rank `root`, in this array's memory."""
        check_root(root, self._size)
        with self._collective() as group:
            group.broadcast(array, root=root)
        return array

    def barrier(self) -> None:
        """Returns once every rank has called it and all work queued before on each rank's stream is done."""
        self.all_reduce(cupy.zeros(1, np.int32))
        cupy.cuda.get_current_stream().synchronize()
        self._check()

    def abort(self, error: BaseException) -> None:
        """Breaks the group; collectives that run on the device end, with no result."""
        self._break(GroupBroken(f"the group of {self._size} ranks is broken: {error}"))

    def close(self) -> None:
        """Frees the group, once no graph with its collectives is left."""
        with self._changed:
            self._changed.wait_for(lambda: self._group is not None or self._broken is not None)
            group, is_whole = self._group, self._broken is None
            self._broken = self._broken or GroupBroken(f"rank {self._rank} has closed its end")
        if group is not None and is_whole:
            if self._one_shot is not None:
                self._one_shot.close()
            group.close()

    # --- sums of more than two ranks --------------------------------------------------------------------

    def _gather_and_sum(self, group: NcclGroup, array: Array) -> None:
        gathered = cupy.empty((self._size, *array.shape), array.dtype)
        group.all_gather(array, gathered)
        self._arrays.sum(gathered, array)

    def _sum_pieces(self, group: NcclGroup, array: Array) -> None:
        pieces = array.reshape(self._size, -1)
        received = cupy.empty_like(pieces)
        group.exchange(pieces, received)
        mine = pieces[self._rank]
        self._arrays.sum(received, mine)
        group.all_gather(mine, pieces)

    # --- the group --------------------------------------------------------------------------------------

    def _join(self, group_id: bytes) -> None:
        """Forms the group and connects its ranks."""
        try:
            self._device.use()
            group = NcclGroup(group_id, rank=self._rank, size=self._size)
            self._warm_up(group)
            one_shot = self._open_one_shot(group)
        except Exception as error:  # whoever waits for this thread must hear of it, whatever it is
            logger.exception("rank %d cannot join", self._rank)
            self._break(GroupBroken(f"rank {self._rank} cannot join: {type(error).__name__}: {error}"))
            return
        with self._changed:
            self._group, self._one_shot = group, one_shot
            is_broken = self._broken is not None
            self._changed.notify_all()
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

    def _open_one_shot(self, group: NcclGroup) -> OneShot | None:
        """What sums small arrays, if all ranks can reach each other's memory."""
        if self._size > MAX_RANKS:
            return None
        with cupy.cuda.Stream(non_blocking=True) as stream:
            made = OneShot(self._device, rank=self._rank, size=self._size, most_bytes=_ONE_SHOT_BYTES)
            handles = cupy.empty((self._size, HANDLE_BYTES), np.uint8)
            mine = cupy.asarray(np.frombuffer(made.handle, np.uint8))
            group.all_gather(mine, handles)
            refusals = cupy.zeros(1, np.int32)
            try:
                made.connect([bytes(handle) for handle in cupy.asnumpy(handles)])
            except KernelsError as error:
                logger.warning("rank %d: sums of small arrays go through NCCL: %s", self._rank, error)
                refusals = cupy.asarray(np.ones(1, np.int32))
            group.all_reduce(refusals, refusals)
            is_possible = int(cupy.asnumpy(refusals)[0]) == 0
            stream.synchronize()
        if not is_possible:
            made.close()
        return made if is_possible else None

    @contextlib.contextmanager
    def _collective(self) -> Generator[NcclGroup]:
        """The group, for one collective.

        Raises:
            GroupBroken: it is broken.
        """
        if self._group is None:
            with self._changed:
                self._changed.wait_for(lambda: self._group is not None or self._broken is not None)
        with self._calling:
            self._check()
            if self._group is None:
                raise GroupBroken("the group was never joined")
            try:
                yield self._group
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
            group = self._group
            self._changed.notify_all()
        if self._one_shot is not None:
            self._one_shot.abort()
        if group is not None:
            threading.Thread(target=self._end, args=(group,), name="openinfer-abort", daemon=True).start()

    def _end(self, group: NcclGroup) -> None:
        has_lock = self._calling.acquire(timeout=_CALL_DEADLINE_S)
        try:
            abort = group.take_abort()
        finally:
            if has_lock:
                self._calling.release()
        abort()
