"""KV blocks kept in host memory and on disk: checksummed, asynchronous, stackable. No engine and no GPU needed."""

from openinfer_kv_offload.disk import DiskTier, DiskTierOptions
from openinfer_kv_offload.errors import KvOffloadError, StoreError, TierConfigError
from openinfer_kv_offload.frequency import LeastFrequentlyUsed
from openinfer_kv_offload.host import HostPolicy, HostTier, HostTierOptions
from openinfer_kv_offload.memory import block_views
from openinfer_kv_offload.queue import QueueOptions
from openinfer_kv_offload.settings import open_tiers
from openinfer_kv_offload.stack import Promotion, StackOptions, TierStack, WriteMode
from openinfer_kv_offload.store import Access

__all__ = [
    "Access",
    "DiskTier",
    "DiskTierOptions",
    "HostPolicy",
    "HostTier",
    "HostTierOptions",
    "KvOffloadError",
    "LeastFrequentlyUsed",
    "Promotion",
    "QueueOptions",
    "StackOptions",
    "StoreError",
    "TierConfigError",
    "TierStack",
    "WriteMode",
    "block_views",
    "open_tiers",
]
