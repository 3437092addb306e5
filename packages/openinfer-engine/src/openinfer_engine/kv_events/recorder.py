"""`KvEventRecorder`: what happened to the prefix cache in one step, on its way to the publisher."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeAlias

from openinfer_kv_cache import Digest, StoredBlocks, TierMedium


class TierChange(NamedTuple):
    """Blocks that can be found in a tier from now on, or no longer."""

    digests: Sequence[Digest]
    medium: TierMedium
    is_stored: bool


# Stored, removed, or (None) all cleared: as it was heard, so that another thread makes messages of it.
PoolChange: TypeAlias = "StoredBlocks | Sequence[Digest] | None"
Change: TypeAlias = "PoolChange | TierChange"


class Publisher(Protocol):
    """Where changes go."""

    def publish(self, changes: Sequence[Change]) -> None:
        """Sends what happened, in order; never waits."""
        ...

    def close(self) -> None:
        """Sends what is left, within a short time."""
        ...


class TierChanges:
    """A `TierListener` that keeps what it hears, from any thread, until the next step."""

    def __init__(self) -> None:
        self._changes: deque[TierChange] = deque()

    def stored(self, digests: Sequence[Digest], medium: TierMedium) -> None:
        self._changes.append(TierChange(digests, medium, is_stored=True))

    def removed(self, digests: Sequence[Digest], medium: TierMedium) -> None:
        self._changes.append(TierChange(digests, medium, is_stored=False))

    def take(self) -> list[TierChange]:
        """What was heard since the last time; neighbours of one kind are one change."""
        taken: list[TierChange] = []
        for _ in range(len(self._changes)):
            change = self._changes.popleft()
            if taken and taken[-1][1:] == change[1:]:
                change = change._replace(digests=[*taken.pop().digests, *change.digests])
            taken.append(change)
        return taken


class KvEventRecorder:
    """A `BlockListener` that hands on what it hears, once per step, and with it what tiers say meanwhile (`of_tiers`).

    Args:
        publisher: is closed with the recorder.
    """

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher
        # At first: what a router remembers of an earlier process at this address is void.
        self._changes: list[Change] = [None]
        self.of_tiers = TierChanges()

    def stored(self, blocks: StoredBlocks) -> None:
        self._changes.append(blocks)

    def removed(self, digests: Sequence[Digest]) -> None:
        self._changes.append(digests)

    def cleared(self) -> None:
        self._changes.append(None)

    def flush(self) -> None:
        self._changes += self.of_tiers.take()
        if self._changes:
            changes, self._changes = self._changes, []
            self._publisher.publish(changes)

    def close(self) -> None:
        self.flush()
        self._publisher.close()
