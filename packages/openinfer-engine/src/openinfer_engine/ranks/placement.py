"""`Placement`: which node and which GPU each rank of an engine has."""

import itertools
from typing import Self

import msgspec


class RankPlace(msgspec.Struct, frozen=True, array_like=True):
    """Where one rank is."""

    node: int  # 0 is the node of rank 0; ranks of one node follow each other
    gpu: int  # among those that its process sees
    address: str = ""  # an IP address of the node that the other nodes reach; empty for one node, and in a plan


class Placement(msgspec.Struct, frozen=True, array_like=True):
    """Where all ranks are, in order of ranks."""

    places: tuple[RankPlace, ...]

    @classmethod
    def on_one_node(cls, size: int) -> Self:
        """Every rank on the machine of the engine; rank N has GPU N."""
        return cls(tuple(RankPlace(0, rank) for rank in range(size)))

    @property
    def nodes(self) -> tuple[int, ...]:
        """The node of each rank."""
        return tuple(place.node for place in self.places)

    @property
    def spans_nodes(self) -> bool:
        return len(set(self.nodes)) > 1

    def gpus_of_node(self, rank: int) -> list[int]:
        """Those that the ranks on this rank's node have."""
        node = self.places[rank].node
        return [place.gpu for place in self.places if place.node == node]


def nodes_in_order(nodes: "tuple[int, ...]") -> list[tuple[int, int]]:
    """First rank and the one after the last, of each node; raises `ValueError` if ranks of a node are not together."""
    found = [(node, len(list(ranks))) for node, ranks in itertools.groupby(nodes)]
    if len({node for node, _ in found}) != len(found):
        raise ValueError(f"the ranks of a node must follow each other, and their nodes are {list(nodes)}")
    ends = list(itertools.accumulate(count for _, count in found))
    return list(zip([0, *ends[:-1]], ends, strict=True))
