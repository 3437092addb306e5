"""What a pool counts."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class EvictionReason(StrEnum):
    """Why a sealed block lost its content."""

    CAPACITY = "capacity"
    """Another sequence needed the space."""
    EXPIRED = "expired"
    """Idle for longer than the time-to-live."""
    DUPLICATE = "duplicate"
    """A second copy of registered content lost its last user."""
    CLEARED = "cleared"
    """`BlockPool.clear` voided it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolCounters:
    """Totals since the pool was made."""

    num_matches: int
    hit_blocks: int
    missed_blocks: int
    """Full blocks that a match was allowed to find and did not."""
    sealed_blocks: int
    duplicate_blocks: int
    """How many of the sealed blocks held content that was registered already."""
    evicted_blocks: Mapping[EvictionReason, int]
