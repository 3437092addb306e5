"""`KvEventRecorder`: what happened to the prefix cache in one step, on its way to the publisher."""

from collections.abc import Sequence
from typing import Protocol, TypeAlias

from openinfer_kv_cache import Digest, StoredBlocks

# Stored, removed, or (None) all cleared: as it was heard, so that another thread makes messages of it.
Change: TypeAlias = "StoredBlocks | Sequence[Digest] | None"


class Publisher(Protocol):
    """Where changes go."""

    def publish(self, changes: Sequence[Change]) -> None:
        """Sends what happened, in order; never waits."""
        ...

    def close(self) -> None:
        """Sends what is left, within a short time."""
        ...


class KvEventRecorder:
    """A `BlockListener` that hands on what it hears, once per step.

    Args:
        publisher: is closed with the recorder.
    """

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher
        # At first: what a router remembers of an earlier process at this address is void.
        self._changes: list[Change] = [None]

    def stored(self, blocks: StoredBlocks) -> None:
        self._changes.append(blocks)

    def removed(self, digests: Sequence[Digest]) -> None:
        self._changes.append(digests)

    def cleared(self) -> None:
        self._changes.append(None)

    def flush(self) -> None:
        if self._changes:
            changes, self._changes = self._changes, []
            self._publisher.publish(changes)

    def close(self) -> None:
        self.flush()
        self._publisher.close()
