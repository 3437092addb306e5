"""How many ranks of a replica each of its nodes has: `8` of each, `8+4+4`, or what the nodes that there are ask for."""

import math
from collections.abc import Iterator, Mapping, Sequence

from openinfer_core import Refused
from openinfer_ray.bundles import Bundle, replicas_on

AUTO = "auto"
_MOST_RANKS = 1024
_MOST_DIGITS = 4


def parse_shares(text: str) -> tuple[int, ...]:
    """The numbers of `8` or `8+4+4`; raises `ValueError`, with the form that it must have."""
    shares = text.split("+")
    if not all(each.isascii() and each.isdigit() and len(each) <= _MOST_DIGITS for each in shares):
        raise ValueError(f"{text!r} is not of the form N or N+N+...")
    numbers = tuple(map(int, shares))
    if not all(1 <= each <= _MOST_RANKS for each in numbers) or sum(numbers) > _MOST_RANKS:
        raise ValueError(f"{text!r} has a number that is not in 1 .. {_MOST_RANKS}, or has more in all")
    return numbers


def text_of(shares: Sequence[int]) -> str:
    """What `parse_shares` reads."""
    return "+".join(map(str, shares))


def shares_of(shares: Sequence[int], *, ranks: int) -> tuple[int, ...]:
    """Ranks of each node, the replica's own first; one number is that of each node.

    Raises:
        ValueError: they are not the ranks, on two nodes or more.
    """
    if len(shares) == 1:
        nodes, left = divmod(ranks, shares[0])
        if left or nodes < 2:
            raise ValueError(f"{ranks} ranks are not two or more nodes of {shares[0]}")
        return tuple(shares) * nodes
    if sum(shares) != ranks:
        raise ValueError(f"{text_of(shares)} are {sum(shares)} ranks, not {ranks}")
    return tuple(shares)


def choose_shares(nodes: Sequence[Mapping[str, float]], *, ranks: int, cpus: int, most: int) -> tuple[int, ...]:
    """GPUs of each node of a replica: of as few nodes as possible, of each the same number where that is possible.

    Sums within a node cost less than those between nodes, and end when the last rank has added its part.

    Args:
        nodes: what Ray says that each has, were it empty.
        ranks: of each replica.
        cpus: that a replica takes of each of its nodes.
        most: replicas that must fit.

    Raises:
        Refused: so many replicas fit in no way.
    """
    counts = sorted((math.floor(each.get("GPU", 0.0)) for each in nodes if each.get("CPU", 0.0) >= cpus), reverse=True)
    for num_nodes in range(1, min(len(counts), ranks) + 1):
        for shares in _ways(ranks, counts[:num_nodes]):
            if replicas_on(nodes, Bundle(cpus=cpus, gpus=shares), most=most) == most:
                return shares
    has = ", ".join(map(str, counts)) or "none"
    raise Refused(
        f"{most} replicas of {ranks} GPUs, and {cpus} CPUs of each of their nodes, do not fit the cluster however they "
        f"are spread: the GPUs of its nodes are {has}"
    )


def _ways(ranks: int, counts: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Shares of so many nodes: equal ones, then those that fill the largest nodes."""
    each, left = divmod(ranks, len(counts))
    if not left and each:
        yield (each,) * len(counts)
    if ranks <= sum(counts) and all(counts):
        shares: list[int] = []
        for index, count in enumerate(counts):
            others = len(counts) - 1 - index  # each needs one at least
            shares.append(min(count, ranks - sum(shares) - others))
        yield tuple(shares)
