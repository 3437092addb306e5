"""What each collective computes from the arrays of all ranks, over NumPy; how the arrays meet is the communicator's."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from openinfer_engine.errors import GroupBroken
from openinfer_engine.ranks.placement import nodes_in_order
from openinfer_kernels import HostArray

# all ranks' arrays, in order, and a rank -> that rank's result, a new array
Combine = Callable[[Sequence[HostArray], int], HostArray]


@dataclass(frozen=True, slots=True)
class HostCollective:
    """One call of a collective."""

    name: str  # with its arguments; all ranks of a group must call the same
    combine: Combine


@dataclass(frozen=True, slots=True)
class Offer:
    """What one rank brings to a collective."""

    operation: str
    array: HostArray


ALL_TO_ALL = HostCollective("all_to_all", lambda arrays, rank: np.stack([each[rank] for each in arrays]))
BARRIER = HostCollective("barrier", lambda arrays, rank: arrays[rank].copy())


def all_gather(axis: int) -> HostCollective:
    return HostCollective(f"all_gather(axis={axis})", lambda arrays, rank: np.concatenate(arrays, axis))


def all_reduce(nodes: Sequence[int]) -> HostCollective:
    return HostCollective("all_reduce", lambda arrays, rank: rank_sum(arrays, nodes))


def reduce_scatter(axis: int, nodes: Sequence[int]) -> HostCollective:
    def combine(arrays: Sequence[HostArray], rank: int) -> HostArray:
        return rank_sum([np.split(each, len(arrays), axis)[rank] for each in arrays], nodes)

    return HostCollective(f"reduce_scatter(axis={axis})", combine)


def broadcast(root: int) -> HostCollective:
    return HostCollective(f"broadcast(root={root})", lambda arrays, rank: arrays[root].copy())


def check_alike(offers: Sequence[Offer]) -> None:
    asked = [f"{offer.operation} of {offer.array.dtype} {list(offer.array.shape)}" for offer in offers]
    if len(set(asked)) > 1:
        listed = "; ".join(f"rank {rank}: {each}" for rank, each in enumerate(asked))
        raise GroupBroken(f"the ranks called different collectives: {listed}")


def rank_sum(arrays: Sequence[HostArray], nodes: Sequence[int]) -> HostArray:
    """The sum of each node's arrays in order of ranks, and of these sums in order of nodes; a new array of one dtype.

    Float16 is accumulated in float32 and rounded once.

    Args:
        arrays: of all ranks.
        nodes: the node of each; those of one node follow each other.
    """
    dtype = arrays[0].dtype
    wide = np.float32 if dtype == np.float16 else dtype
    sums: list[HostArray] = []
    for begin, end in nodes_in_order(tuple(nodes)):
        total = arrays[begin].astype(wide)
        for each in arrays[begin + 1 : end]:
            total += each
        sums.append(total)
    for total in sums[1:]:
        sums[0] += total
    return sums[0].astype(dtype, copy=False)
