"""KV blocks in host memory, on disk and on servers: checksummed, asynchronous, stackable. No engine, no GPU needed."""

from openinfer_kv_offload.disk import DiskTier, DiskTierOptions
from openinfer_kv_offload.errors import KvOffloadError, StoreError, TierConfigError
from openinfer_kv_offload.frequency import LeastFrequentlyUsed
from openinfer_kv_offload.host import HostTier
from openinfer_kv_offload.host_options import HostPolicy, HostTierOptions
from openinfer_kv_offload.memory import block_views
from openinfer_kv_offload.object_store import ObjectStore
from openinfer_kv_offload.queue import QueueOptions
from openinfer_kv_offload.remote import RemoteTier, RemoteTierOptions
from openinfer_kv_offload.setting_fields import parse_size
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
    "ObjectStore",
    "Promotion",
    "QueueOptions",
    "RemoteTier",
    "RemoteTierOptions",
    "StackOptions",
    "StoreError",
    "TierConfigError",
    "TierStack",
    "WriteMode",
    "block_views",
    "open_tiers",
    "parse_size",
]
