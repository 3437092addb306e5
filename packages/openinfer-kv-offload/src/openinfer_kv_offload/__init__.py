"""KV blocks in host memory, on disk and on servers: checksummed, asynchronous, stackable. No engine, no GPU needed."""

from openinfer_kv_offload.disk.tier import DiskTier, DiskTierOptions
from openinfer_kv_offload.errors import KvOffloadError, StoreError, TierConfigError
from openinfer_kv_offload.format.manifest import StoreAccess
from openinfer_kv_offload.host.frequency import LeastFrequentlyUsed
from openinfer_kv_offload.host.options import HostPolicy, HostTierOptions
from openinfer_kv_offload.host.tier import HostTier
from openinfer_kv_offload.remote.object_store import ObjectStore
from openinfer_kv_offload.remote.tier import RemoteTier, RemoteTierOptions
from openinfer_kv_offload.setting_fields import parse_size
from openinfer_kv_offload.settings import open_tiers
from openinfer_kv_offload.stack.tier import Promotion, StackOptions, TierStack, WriteMode
from openinfer_kv_offload.transfer.memory import block_views
from openinfer_kv_offload.transfer.queue import QueueOptions

__all__ = [
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
    "StoreAccess",
    "StoreError",
    "TierConfigError",
    "TierStack",
    "WriteMode",
    "block_views",
    "open_tiers",
    "parse_size",
]
