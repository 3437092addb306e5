"""Sums over ranks on GPUs: accumulated in float32 in order of ranks, rounded once, whatever the way.

Over several nodes each node's ranks are added up first, and then the nodes' sums, in order: the bits follow from which
rank is where, and one rank per node gives those of as many ranks on one node.

    few rows          one kernel: each rank writes into the others' memory          `open_one_shot`
    two ranks         NCCL's own, one addition
    more, short       gathered whole, then added up                                 `ExactSums.gather`
    more, long        pieces exchanged, added up, gathered                          `ExactSums.exchange_pieces`

NCCL adds up in the array's dtype and in an order of its own, which of more than two ranks is neither.
"""

from collections.abc import Sequence
from functools import partial

from openinfer_engine.distributed.nccl_peers import connect_peers
from openinfer_engine.ranks.placement import nodes_in_order
from openinfer_kernels import Array
from openinfer_kernels.cuda.comm.nccl import NcclGroup
from openinfer_kernels.cuda.comm.one_shot import OneShot
from openinfer_kernels.cuda.comm.peer_buffers import HANDLE_BYTES
from openinfer_kernels.cuda.comm.rank_arrays import RankArrays
from openinfer_kernels.cuda.common.arrays import VECTOR_BYTES
from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.cuda.common.libraries import cupy

# of arrays that are summed by one kernel: what a rank sends at most, which is the array whole to every other rank. So
# long all blocks of the kernel are on the device at once: none waits for a place while others wait for its part
ONE_SHOT_SENT_BYTES = 1 << 21
# of all ranks' arrays together: up to here they are gathered whole, which is one exchange instead of two
_GATHERED_BYTES = 1 << 19
_PIECE_VALUES = 8  # pieces of a sum begin at multiples of so many values, hence of 16 bytes


class ExactSums:
    """Sums of BF16 or float32 arrays of any number of ranks, in place, over NCCL."""

    def __init__(self, group: NcclGroup, arrays: RankArrays, *, rank: int, size: int, nodes: Sequence[int]) -> None:
        # None: the order of ranks and that of nodes are one
        counts = [end - begin for begin, end in nodes_in_order(tuple(nodes))]
        self._node_counts = counts if len(counts) > 1 and max(counts) > 1 else None
        self._group = group
        self._arrays = arrays
        self._rank = rank
        self._size = size

    def all_reduce(self, array: Array) -> None:
        if self._size == 2 or array.dtype.kind in "iu":  # one addition; integers are exact in any order
            self._group.all_reduce(array, array)
        elif array.size % (self._size * _PIECE_VALUES) or array.nbytes * self._size <= _GATHERED_BYTES:
            self.gather(array)
        else:
            self.exchange_pieces(array)

    def gather(self, array: Array) -> None:
        gathered = cupy.empty((self._size, *array.shape), array.dtype)
        self._group.all_gather(array, gathered)
        self.sum(gathered, array)

    def exchange_pieces(self, array: Array) -> None:
        """Every rank adds up one piece of all arrays, and all gather the sums; the size divides by the ranks."""
        pieces = array.reshape(self._size, -1)
        received = cupy.empty_like(pieces)
        self._group.exchange(pieces, received)
        mine = pieces[self._rank]
        self.sum(received, mine)
        self._group.all_gather(mine, pieces)

    def sum(self, ranks: Array, out: Array) -> None:
        """`out [...]` of all ranks' `ranks [size, ...]`, in order of ranks within a node, and of nodes."""
        if self._node_counts is None:
            self._arrays.sum(ranks, out)
        else:
            self._arrays.sum_nodes(ranks, out, node_counts=self._node_counts)


def open_one_shot(
    group: NcclGroup, device: Device, *, rank: int, size: int, sent_bytes: int = ONE_SHOT_SENT_BYTES
) -> OneShot | None:
    """What sums small arrays, if all ranks can reach each other's memory; called on every rank."""
    most_bytes = sent_bytes // (size - 1) // VECTOR_BYTES * VECTOR_BYTES
    make = partial(OneShot, device, rank=rank, size=size, most_bytes=most_bytes)
    otherwise = "sums of small arrays go through NCCL"
    return connect_peers(group, make, handle_bytes=HANDLE_BYTES, rank=rank, size=size, otherwise=otherwise)
