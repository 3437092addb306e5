"""`BlockPeer`: another engine's blocks, as this one asks for them. A peer that is gone has none."""

import contextlib
from collections.abc import Generator, Sequence

from openinfer_kv_cache import Digest
from openinfer_nixl.gpu.messages import MOST_COUNTED, Answer, Count, Counted, Lease, Leased
from openinfer_nixl.messages import GiveBack
from openinfer_nixl.peers import PeerConnection, Told


class BlockPeer:
    """Used from several threads at once, as its connection is."""

    def __init__(self, connection: "PeerConnection[Answer]") -> None:
        self._connection = connection
        self.close = connection.close

    def count(self, digests: Sequence[Digest]) -> int:
        """How many of a chain's first blocks it has."""
        told = self._connection.ask(Count(tuple(digests[:MOST_COUNTED])))
        return min(told.answer.num_blocks, len(digests)) if told and isinstance(told.answer, Counted) else 0

    @contextlib.contextmanager
    def leased(self, digests: Sequence[Digest]) -> "Generator[Told[Leased] | None]":
        """Blocks of the peer while they stay where they are; None if it has none of them."""
        told = self._connection.ask(Lease(tuple(digests)))
        if told is None or not isinstance(told.answer, Leased):
            yield None
            return
        try:
            # More than was asked for cannot be: what it says is not believed.
            yield Told(told.peer, told.answer) if 0 < len(told.answer.blocks) <= len(digests) else None
        finally:
            self._connection.tell(GiveBack(told.answer.lease_id))
