"""What an index of blocks tells of its changes: to nothing, or to a `TierListener`.

An index tells while its tier's lock is held, so that what is heard is in the order in which it happened.
"""

from typing import Protocol

from openinfer_kv_cache import Digest, TierListener, TierMedium


class IndexListener(Protocol):
    """Hears of one block at a time."""

    def stored(self, digest: Digest) -> None: ...

    def removed(self, digest: Digest) -> None: ...


class NotTold:
    """Of an index that no listener asked for."""

    def stored(self, digest: Digest) -> None:
        del digest

    def removed(self, digest: Digest) -> None:
        del digest


class ToldOf:
    """Hands on what an index says, with its medium."""

    def __init__(self, listener: TierListener, medium: TierMedium) -> None:
        self._listener = listener
        self._medium = medium

    def stored(self, digest: Digest) -> None:
        self._listener.stored((digest,), self._medium)

    def removed(self, digest: Digest) -> None:
        self._listener.removed((digest,), self._medium)
