"""What the engine's process and the process that speaks to Ray for it tell each other: a line of JSON each.

engine ─► Place ─► placer: connects, starts an actor on each node
engine ◄─ Placed | Failed
engine ─► Invite ─► placer: tells the actors where to join
engine ◄─ Failed, when an actor or what it has started has ended
end of the engine's input ─► placer: ends the actors, and itself
"""

import msgspec


class Place(msgspec.Struct, frozen=True, kw_only=True, tag="place"):
    """Where ranks are to be had."""

    address: str
    shares: tuple[int, ...]  # ranks of each node but the head's
    cpus: int  # of each node
    on_gpu: bool  # whether each rank needs one
    wait_s: float
    group: str
    model: str  # its folder's path on these nodes; empty: the engine's own


class Placed(msgspec.Struct, frozen=True, kw_only=True, tag="placed"):
    """All actors are there."""

    host: str
    """The address that Ray knows of the head's node: other nodes reach it."""


class Invite(msgspec.Struct, frozen=True, kw_only=True, tag="invite"):
    """Where the head listens."""

    host: str
    port: int
    token: bytes


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """Ranks cannot be had, or are gone."""

    why: str


class Invitation(msgspec.Struct, frozen=True, kw_only=True):
    """What one actor is told, through Ray."""

    to: Invite
    node: str
    node_index: int
    ranks: int
    model: str  # before the node's own `model_paths`; empty: the engine's own


FromPlacer = Placed | Failed
ToPlacer = Place | Invite

from_placer: msgspec.json.Decoder[FromPlacer] = msgspec.json.Decoder(FromPlacer)
to_placer: msgspec.json.Decoder[ToPlacer] = msgspec.json.Decoder(ToPlacer)


def line_of(message: FromPlacer | ToPlacer) -> bytes:
    """One line, with its end."""
    return msgspec.json.encode(message) + b"\n"
