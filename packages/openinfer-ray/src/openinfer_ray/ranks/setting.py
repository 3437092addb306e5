"""What follows `--rank-host ray=`."""

from typing import Self

import msgspec

from openinfer_core import InvalidRequest, Refused
from openinfer_engine.ranks.contract import RankSpec
from openinfer_ray.options import is_cluster

_MOST_RANKS = 1024
_MOST_CPUS = 1024
_LONGEST_WAIT_S = 7 * 86_400
_HEX_DIGITS = frozenset("0123456789abcdef")
_MOST_DIGITS = 128
_FORM = "auto|HOST:PORT,ranks-per-node=N[,cpus=N][,wait-s=N][,group=ID]"


class RaySetting(msgspec.Struct, frozen=True, kw_only=True):
    """Which cluster places ranks, and how many of them a node has: the head's, and each other one."""

    address: str
    ranks_per_node: int
    cpus: int = 1
    """That Ray keeps for the ranks of one node."""
    wait_s: int = 600
    """For nodes that are free, for actors on them, and for the ranks to come."""
    group: str = ""
    """A placement group whose first bundle has the head, and each other one the ranks of a node; empty: one is made."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads a setting; raises `InvalidRequest`, with the form that it must have."""
        address, *rest = text.split(",")
        given = {name: value for name, _, value in (each.partition("=") for each in rest)}
        unknown = given.keys() - {"ranks-per-node", "cpus", "wait-s", "group"}
        if unknown or len(given) != len(rest) or "ranks-per-node" not in given or not is_cluster(address):
            raise _wrong(f"{text!r} is not of the form {_FORM}")
        group = given.get("group", "")
        if not _HEX_DIGITS.issuperset(group) or len(group) > _MOST_DIGITS or len(group) % 2:
            raise _wrong(f"group is {group!r}; it must be the hexadecimal id of a placement group")
        return cls(
            address=address,
            ranks_per_node=_number(given["ranks-per-node"], "ranks-per-node", _MOST_RANKS),
            cpus=_number(given.get("cpus", "1"), "cpus", _MOST_CPUS),
            wait_s=_number(given.get("wait-s", "600"), "wait-s", _LONGEST_WAIT_S),
            group=group,
        )

    @property
    def text(self) -> str:
        """What `parse` reads."""
        group = f",group={self.group}" if self.group else ""
        return f"{self.address},ranks-per-node={self.ranks_per_node},cpus={self.cpus},wait-s={self.wait_s}{group}"

    def num_other_nodes(self, spec: RankSpec) -> int:
        """Nodes but the head's; raises `Refused` if the ranks are no whole nodes, or all on one."""
        nodes, left = divmod(spec.num_ranks, self.ranks_per_node)
        if left or nodes < 2:
            raise Refused(
                f"--rank-host ray: {spec.num_ranks} ranks are not two or more nodes of {self.ranks_per_node} "
                "(ranks-per-node)" + ("" if left else "; leave --rank-host out")
            )
        return nodes - 1


def _number(text: str, name: str, most: int) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= most):
        raise _wrong(f"{name} is {text!r}; it must be a number from 1 to {most}")
    return int(text)


def _wrong(message: str) -> InvalidRequest:
    return InvalidRequest(f"--rank-host ray: {message}", field="rank_host")
