"""What each collective computes from the arrays of all ranks, over NumPy; how the arrays meet is the communicator's."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from openinfer_engine.errors import GroupBroken
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


ALL_REDUCE = HostCollective("all_reduce", lambda arrays, rank: rank_sum(arrays))
ALL_TO_ALL = HostCollective("all_to_all", lambda arrays, rank: np.stack([each[rank] for each in arrays]))
BARRIER = HostCollective("barrier", lambda arrays, rank: arrays[rank].copy())


def all_gather(axis: int) -> HostCollective:
    return HostCollective(f"all_gather(axis={axis})", lambda arrays, rank: np.concatenate(arrays, axis))


def reduce_scatter(axis: int) -> HostCollective:
    def combine(arrays: Sequence[HostArray], rank: int) -> HostArray:
        return rank_sum([np.split(each, len(arrays), axis)[rank] for each in arrays])

    return HostCollective(f"reduce_scatter(axis={axis})", combine)


def broadcast(root: int) -> HostCollective:
    return HostCollective(f"broadcast(root={root})", lambda arrays, rank: arrays[root].copy())


def check_alike(offers: Sequence[Offer]) -> None:
    asked = [f"{offer.operation} of {offer.array.dtype} {list(offer.array.shape)}" for offer in offers]
    if len(set(asked)) > 1:
        listed = "; ".join(f"rank {rank}: {each}" for rank, each in enumerate(asked))
        raise GroupBroken(f"the ranks called different collectives: {listed}")


def rank_sum(arrays: Sequence[HostArray]) -> HostArray:
    """The sum in order of ranks, a new array of the same dtype; float16 is accumulated in float32."""
    dtype = arrays[0].dtype
    total = arrays[0].astype(np.float32 if dtype == np.float16 else dtype)
    for each in arrays[1:]:
        total += each
    return total.astype(dtype, copy=False)
