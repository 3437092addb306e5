"""`RankShare`: another rank's share of every block and slot, in tiers of its own.

Rank 0 decides what is loaded and saved; each other rank does the same with its share. What rank 0's tiers have and
another's do not ends partial there, and is computed.
"""

from collections.abc import Sequence
from typing import Protocol

from openinfer_core.engine import KvTierStats
from openinfer_engine.kv_tiers.contents import TierContents
from openinfer_kv_cache import Digest, TierTransfer
from openinfer_kv_cache.digest import DIGEST_BYTES


class RankShare(Protocol):
    """What rank 0's port asks of another rank, by one thread but for `stats` and `faults`."""

    def load(self, digests: Sequence[Digest], places: Sequence[int]) -> TierTransfer:
        """Begins to fill places with as much of a chain as the rank's tiers hold."""
        ...

    def save(self, digests: Sequence[Digest], places: Sequence[int]) -> TierTransfer:
        """Begins to copy what no step writes to any more into the rank's tiers."""
        ...

    def prefetch(self, digests: Sequence[Digest]) -> None:
        """Begins to bring what slow tiers of the rank have of a chain into its fastest one; nothing waits for it."""
        ...

    @property
    def faults(self) -> int:
        """Times a tier raised where it may not."""
        ...

    def stats(self) -> tuple[KvTierStats, ...]:
        """One entry for each tier."""
        ...

    def close(self) -> None:
        """Closes the rank's tiers, if they are this process's."""
        ...


class TellingShare(RankShare, Protocol):
    """Of a rank whose scheduler is in another process than its tiers, and knows of them what they tell."""

    @property
    def contents(self) -> TierContents | None:
        """None of tiers that do not tell."""
        ...

    def look(self, digest: Digest) -> None:
        """Lets the rank's tiers look for what other processes have stored, if they do so when they miss a block."""
        ...


def unpack_digests(packed: bytes) -> list[Digest]:
    """Those of a message, which has them one after the other."""
    return [Digest(packed[begin : begin + DIGEST_BYTES]) for begin in range(0, len(packed), DIGEST_BYTES)]
