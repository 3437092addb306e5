"""What replicas need of nodes, and how many of them nodes have room for, were they empty."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

import msgspec


class Bundle(msgspec.Struct, frozen=True, kw_only=True):
    """What one replica needs of its nodes, which are different ones."""

    cpus: int
    """Of each."""
    gpus: tuple[int, ...]
    """Of each, the replica's own first."""

    @property
    def resources(self) -> list[dict[str, float]]:
        """As Ray counts them, by node."""
        return [{"CPU": float(self.cpus), **({"GPU": float(each)} if each else {})} for each in self.gpus]


def places_on(node: Mapping[str, float], needs: Mapping[str, float]) -> int:
    """How often a node of these resources has what is needed."""
    return min(math.floor(node.get(name, 0.0) / amount) for name, amount in needs.items())


def replicas_on(nodes: Sequence[Mapping[str, float]], bundle: Bundle, *, most: int) -> int:
    """How many replicas, up to so many, empty nodes of these resources hold.

    Of replicas with unequal shares it may say fewer where only a rare way to place them would do.
    """
    fits = _equal_shares_fit if len(set(bundle.gpus)) == 1 else _unequal_shares_fit
    return next((count for count in range(most, 0, -1) if fits(nodes, bundle, count)), 0)


def _equal_shares_fit(nodes: Sequence[Mapping[str, float]], bundle: Bundle, count: int) -> bool:
    room = [places_on(node, bundle.resources[0]) for node in nodes]
    return sum(min(each, count) for each in room) >= count * len(bundle.gpus)


def _unequal_shares_fit(nodes: Sequence[Mapping[str, float]], bundle: Bundle, count: int) -> bool:
    """Places all replicas' largest shares, then what is smaller, each size in as many ways as there are."""
    free = [dict(node) for node in sorted(nodes, key=lambda each: each.get("GPU", 0.0))]  # tight nodes are tried first
    taken: list[set[int]] = [set() for _ in range(count)]
    for gpus, times in sorted(Counter(bundle.gpus).items(), reverse=True):
        (needs,) = Bundle(cpus=bundle.cpus, gpus=(gpus,)).resources
        placing = _Placing([places_on(node, needs) for node in free], taken)
        if not all(placing.place(replica) for _ in range(times) for replica in range(count)):
            return False
        for node, replicas in enumerate(placing.of_node):
            for replica in replicas:
                taken[replica].add(node)
                for name, amount in needs.items():
                    free[node][name] -= amount
    return True


class _Placing:
    """Shares of one size on nodes: a matching, found by augmenting paths.

    Args:
        room: shares that each node holds.
        taken: nodes that each replica has already, of which it gets no further share.
    """

    def __init__(self, room: Sequence[int], taken: Sequence[AbstractSet[int]]) -> None:
        self._room = room
        self._taken = taken
        self.of_node: list[list[int]] = [[] for _ in room]

    def place(self, replica: int) -> bool:
        """Places one more share of a replica, moving others if need be; whether that is possible."""
        return self._place(replica, set())

    def _place(self, replica: int, seen: set[int]) -> bool:
        for node, limit in enumerate(self._room):
            held = self.of_node[node]
            if node in seen or node in self._taken[replica] or replica in held:
                continue
            seen.add(node)
            if len(held) < limit:
                held.append(replica)
                return True
            for index, other in enumerate(held):
                if self._place(other, seen):
                    held[index] = replica
                    return True
        return False
