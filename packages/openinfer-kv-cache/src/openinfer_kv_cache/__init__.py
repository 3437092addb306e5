"""KV block bookkeeping: a prefix-caching pool, sequences, state slots, layouts as data. No GPU needed."""

from openinfer_kv_cache.blocks import BlockPin, BlockPool, BlockState, EvictionReason, PoolCounters
from openinfer_kv_cache.cache import KvCache, KvCacheOptions
from openinfer_kv_cache.digest import Digest, PrefixHasher
from openinfer_kv_cache.errors import (
    BlockStateError,
    EvictionPolicyError,
    IntegrityError,
    KvCacheError,
    KvConfigError,
    LayoutMismatchError,
    SequenceStateError,
)
from openinfer_kv_cache.eviction import EvictionPolicy, LeastRecentlyUsed
from openinfer_kv_cache.sequence import BlockSequence

__all__ = [
    "BlockPin",
    "BlockPool",
    "BlockSequence",
    "BlockState",
    "BlockStateError",
    "Digest",
    "EvictionPolicy",
    "EvictionPolicyError",
    "EvictionReason",
    "IntegrityError",
    "KvCache",
    "KvCacheError",
    "KvCacheOptions",
    "KvConfigError",
    "LayoutMismatchError",
    "LeastRecentlyUsed",
    "PoolCounters",
    "PrefixHasher",
    "SequenceStateError",
]
