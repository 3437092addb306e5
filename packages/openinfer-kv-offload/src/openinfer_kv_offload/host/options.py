"""What a user may choose of a `HostTier`."""

from enum import StrEnum

import msgspec

from openinfer_core.process.processors import usable_processors
from openinfer_kv_offload.errors import TierConfigError
from openinfer_kv_offload.transfer.queue import QueueOptions

# The default: so many keep a GPU's bus busy, and more take the interpreter from others.
_NUM_THREADS = min(3, max(2, usable_processors() // 2))


class HostPolicy(StrEnum):
    """Which block is given up first."""

    LRU = "lru"
    LFU = "lfu"


class HostTierOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of a `HostTier`.

    Raises:
        TierConfigError: a field is out of range.
    """

    capacity_bytes: int
    policy: HostPolicy = HostPolicy.LRU
    ttl_s: float | None = None
    """A block that was not found for so long is evicted."""
    queue: QueueOptions = msgspec.field(default_factory=lambda: QueueOptions(num_threads=_NUM_THREADS))

    def __post_init__(self) -> None:
        if self.ttl_s is not None and self.ttl_s <= 0:
            raise TierConfigError(f"ttl_s is {self.ttl_s}; it must be more than 0, or absent")
