"""What follows `--rank-host ray=`."""

from typing import Self
from urllib.parse import quote, unquote

import msgspec

from openinfer_core import InvalidRequest, Refused
from openinfer_engine.ranks.contract import RankSpec
from openinfer_ray.options import is_cluster
from openinfer_ray.shares import parse_shares, shares_of, text_of

_MOST_CPUS = 1024
_LONGEST_WAIT_S = 7 * 86_400
_HEX_DIGITS = frozenset("0123456789abcdef")
_MOST_DIGITS = 128
_FORM = "auto|HOST:PORT,ranks-per-node=N[+N...][,cpus=N][,wait-s=N][,group=ID][,model=PATH]"


class RaySetting(msgspec.Struct, frozen=True, kw_only=True):
    """Which cluster places ranks, and how many of them a node has: the head's, and each other one."""

    address: str
    shares: tuple[int, ...]
    """Ranks of the head's node and of each other one; one number is that of every node."""
    cpus: int = 1
    """That Ray keeps for the ranks of one node."""
    wait_s: int = 600
    """For nodes that are free, for actors on them, and for the ranks to come."""
    group: str = ""
    """A placement group whose first bundle has the head, and each other one the ranks of a node; empty: one is made."""
    model: str = ""
    """The path of the model's folder on the other nodes, which each may replace (`model_paths`); empty: as here."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads a setting; raises `InvalidRequest`, with the form that it must have."""
        address, *rest = text.split(",")
        given = {name: value for name, _, value in (each.partition("=") for each in rest)}
        unknown = given.keys() - {"ranks-per-node", "cpus", "wait-s", "group", "model"}
        if unknown or len(given) != len(rest) or "ranks-per-node" not in given or not is_cluster(address):
            raise _wrong(f"{text!r} is not of the form {_FORM}")
        group = given.get("group", "")
        if not _HEX_DIGITS.issuperset(group) or len(group) > _MOST_DIGITS or len(group) % 2:
            raise _wrong(f"group is {group!r}; it must be the hexadecimal id of a placement group")
        try:
            shares = parse_shares(given["ranks-per-node"])
        except ValueError as error:
            raise _wrong(f"ranks-per-node: {error}") from error
        return cls(
            address=address,
            shares=shares,
            cpus=_number(given.get("cpus", "1"), "cpus", _MOST_CPUS),
            wait_s=_number(given.get("wait-s", "600"), "wait-s", _LONGEST_WAIT_S),
            group=group,
            model=unquote(given.get("model", "")),
        )

    @property
    def text(self) -> str:
        """What `parse` reads."""
        more = f",group={self.group}" if self.group else ""
        more += f",model={quote(self.model)}" if self.model else ""
        return f"{self.address},ranks-per-node={text_of(self.shares)},cpus={self.cpus},wait-s={self.wait_s}{more}"

    def shares_of(self, spec: RankSpec) -> tuple[int, ...]:
        """Ranks of each node, the head's first; raises `Refused` if they are not the engine's, on two nodes or more."""
        try:
            return shares_of(self.shares, ranks=spec.num_ranks)
        except ValueError as error:
            raise Refused(f"--rank-host ray: {error} (ranks-per-node); with all on one node leave it out") from error


def _number(text: str, name: str, most: int) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= most):
        raise _wrong(f"{name} is {text!r}; it must be a number from 1 to {most}")
    return int(text)


def _wrong(message: str) -> InvalidRequest:
    return InvalidRequest(f"--rank-host ray: {message}", field="rank_host")
