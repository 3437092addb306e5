"""`NixlStore`: an `ObjectStore` whose objects lie in this process's memory and in that of its peers."""

import logging
import queue
from collections.abc import Iterable, Sequence

from openinfer_nixl.agent import Agent, Piece, StillMoving
from openinfer_nixl.arena import Arena
from openinfer_nixl.directory import Directory
from openinfer_nixl.messages import Leased
from openinfer_nixl.peers import Peer

logger = logging.getLogger("openinfer.kv_offload")


class NixlStore:
    """What this process puts stays here; what peers have put is read from them. What is deleted is its own alone.

    A peer that is gone has nothing: a miss, never an error.

    Args:
        arena: of this process.
        directory: tells peers of it.
        peers: whose objects are read.
        agent: moves their bytes into the arena's landings.
        timeout_s: of one transfer.
        address: where the directory listens, for messages.
    """

    def __init__(
        self,
        arena: Arena,
        directory: Directory,
        peers: Sequence[Peer],
        agent: Agent,
        *,
        timeout_s: float,
        address: str,
    ) -> None:
        self.address = address
        self._arena = arena
        self._directory = directory
        self._peers = tuple(peers)
        self._agent = agent
        self._timeout_s = timeout_s
        self._landings: queue.SimpleQueue[int] = queue.SimpleQueue()
        for landing in arena.landings:
            self._landings.put(landing)

    def put(self, key: str, content: memoryview | bytes) -> None:
        self._arena.put(key, content)

    def get(self, key: str) -> bytes | None:
        found = self._arena.get(key)
        if found is not None:
            return found
        for peer in self._peers:
            with peer.leased(key) as leased:
                if leased is not None and (found := self._fetch(*leased)) is not None:
                    return found
        return None

    def has(self, key: str) -> bool:
        return self._arena.has(key) or any(peer.has(key) for peer in self._peers)

    def delete(self, keys: Sequence[str]) -> None:
        self._arena.delete(keys)

    def list(self, prefix: str) -> Iterable[str]:
        found = set(self._arena.keys(prefix))
        return found.union(*(peer.keys(prefix) for peer in self._peers))

    def close(self) -> None:
        self._directory.close()
        for peer in self._peers:
            peer.close()
        self._agent.close()

    def _fetch(self, peer: str, leased: Leased) -> bytes | None:
        """The bytes; None where the peer is gone meanwhile, or says what cannot be.

        Raises:
            StillMoving: the transfer has not ended in its time, or too many others have not.
        """
        if leased.num_bytes > self._arena.slot_bytes:
            logger.warning("a peer leases %d bytes, and no object is larger than a block's", leased.num_bytes)
            return None
        try:
            landing = self._landings.get(timeout=self._timeout_s)
        except queue.Empty as error:
            raise StillMoving("no place is free for what peers send: too many transfers have not ended") from error
        try:
            self._agent.read(peer, [Piece(leased.address, landing, leased.num_bytes)], timeout_s=self._timeout_s)
            found = self._arena.bytes_at(landing, leased.num_bytes)
        except StillMoving:
            raise  # the place is never used again: what is under way may still write there
        except ConnectionError as error:
            logger.warning("a peer's block could not be read: %s", error)
            found = None
        self._landings.put(landing)
        return found
