"""`Peers`: the other processes of one server, as far as a worker needs to know them."""

from collections.abc import Sequence
from typing import Protocol

from openinfer_server.observability.metrics_snapshot import MetricsSnapshot

PEERS_TIMEOUT_S = 3.0  # a worker that does not say what it counted for so long is not well


class Peers(Protocol):
    """The other workers."""

    @property
    def lost(self) -> str | None:
        """What is wrong, once one of them has ended by itself."""
        ...

    async def snapshots(self) -> Sequence[MetricsSnapshot]:
        """What each of them has counted.

        Raises:
            TimeoutError: one does not answer.
        """
        ...


class NoPeers:
    """A server of one process."""

    lost: str | None = None

    async def snapshots(self) -> Sequence[MetricsSnapshot]:
        return ()
