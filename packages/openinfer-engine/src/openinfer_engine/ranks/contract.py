"""`RankHost`: the contract of what starts ranks somewhere, and `RankLink`, by which the engine reaches one of them.

    RankHost.start(rank, spec) ─► RankLink          once for each rank from 1 on, in order
    RankHost.placement()                            after all have started
    RankLink.send, frames                           Build … Leave, and what the rank answers: `worker.messages`
    RankLink.kill | RankLink.end                    the rank's end
    RankHost.close                                  after the end of all links

A host has placement and life; steps go through the link alone. What runs at the other end is
`python -m openinfer_engine.worker.process`, which takes orders from the descriptor that it is given. A plug-in of the
group `openinfer.rank_hosts` is a function that makes a host of the text after the `=` in `--rank-host NAME=SETTING`.
"""

from collections.abc import Callable, Iterator
from typing import Protocol, TypeAlias, runtime_checkable

import msgspec

from openinfer_engine.ranks.placement import Placement


class RankSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a host is told of the ranks that it starts."""

    num_ranks: int
    """Of the engine, rank 0 among them."""
    on_gpu: bool
    """Whether each needs a GPU of its own."""


class RankLink(Protocol):
    """The engine's end of the link to one rank. All methods may be called by any thread."""

    @property
    def name(self) -> str:
        """Where the rank runs, for messages to people: `process 4711`, `GPU 3 of node b`."""
        ...

    @property
    def process_id(self) -> int | None:
        """Of the rank's process if that is this machine's; None if it is not, or not known."""
        ...

    @property
    def shares_environment(self) -> bool:
        """Whether the rank runs the very packages and files of the engine, so that none of them are compared."""
        ...

    def send(self, frame: bytes) -> None:
        """Sends one frame whole, after those before; may leave the waiting to a thread of its own.

        Raises:
            OSError: the rank is gone. It need not be noticed here: `frames` ends.
        """
        ...

    def frames(self) -> Iterator[bytes]:
        """The bodies of the frames that come, until the rank's end of the link is closed. Called once.

        Raises:
            OSError, ContractViolation: the link broke, or what came is no frame.
        """
        ...

    def how_it_ended(self) -> str:
        """What is known of the rank's end after `frames` has ended, for: `rank 1 has died: …`."""
        ...

    def kill(self) -> None:
        """Ends the link at once, and the rank if it can be reached; `send` and `frames` that wait end. Idempotent."""
        ...

    def end(self, *, deadline_s: float) -> None:
        """Waits for the end of a rank that was told to leave, and kills it after so many seconds. Idempotent."""
        ...


class RankHost(Protocol):
    """Starts the ranks of one engine other than the first."""

    def start(self, rank: int, spec: RankSpec) -> RankLink:
        """Starts a rank; called for 1, 2, … in this order.

        Raises:
            Refused: it cannot be had; the message says what to do.
            GroupBroken: what should have run it died.
        """
        ...

    def placement(self) -> Placement:
        """Where all ranks are, rank 0 too, once all have started."""
        ...

    def close(self) -> None:
        """Frees what it holds, after all links have ended. Idempotent."""
        ...


@runtime_checkable
class PlansPlacement(Protocol):
    """What a factory of hosts may be, too. Without it `openinfer plan` takes all ranks to be on this machine."""

    def planned(self, setting: str, spec: RankSpec) -> Placement:
        """Where ranks would be; starts none, and opens nothing. Nodes that are not known yet have no address.

        Raises:
            InvalidRequest: the setting is not one.
            Refused: so many ranks cannot be had.
        """
        ...


RankHostFactory: TypeAlias = Callable[[str], RankHost]
"""What an entry point of the group names: it gets the setting, empty if there is none; raises `InvalidRequest`."""
