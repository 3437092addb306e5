"""KV block bookkeeping: a prefix-caching pool, sequences, state slots, layouts as data. No GPU needed."""

from openinfer_kv_cache.block_table import BlockTable
from openinfer_kv_cache.blocks import BlockPin, BlockPool, BlockState
from openinfer_kv_cache.cache import KvCache, KvCacheOptions
from openinfer_kv_cache.counters import EvictionReason, PoolCounters
from openinfer_kv_cache.digest import Digest, PrefixHasher, table_digest, table_digests
from openinfer_kv_cache.errors import (
    BlockStateError,
    EvictionPolicyError,
    IntegrityError,
    KvCacheError,
    KvConfigError,
    KvTierError,
    LayoutMismatchError,
    SequenceStateError,
)
from openinfer_kv_cache.eviction.conversations import Conversations
from openinfer_kv_cache.eviction.fair import FairLeastRecentlyUsed
from openinfer_kv_cache.eviction.policy import (
    EvictionPolicy,
    EvictsByOwner,
    KeepsConversations,
    LeastRecentlyUsed,
    RetainsBlocks,
)
from openinfer_kv_cache.layout import GroupKind, KvGroupLayout, KvLayout, KvRegion, check_same_layout
from openinfer_kv_cache.listener import BlockListener, StoredBlocks
from openinfer_kv_cache.sequence import BlockSequence
from openinfer_kv_cache.spec import (
    FP8_KV_TAG,
    FP8_SCALE_BYTES,
    KvDtype,
    KvSpec,
    PagedGroup,
    PagedTensor,
    StateSlotGroup,
    StateTensor,
    attention_group,
)
from openinfer_kv_cache.state_slots import CopyKind, StateSlotCopy, StateSlotPool, StateSlotStatus
from openinfer_kv_cache.tiers.contract import (
    EvictingTier,
    KvTier,
    KvTierFactory,
    TierCondition,
    TierCounters,
    TierFailure,
    TierHit,
    TierSettingCheck,
    Transfer,
    TransferState,
)
from openinfer_kv_cache.tiers.port import (
    KvEventSource,
    PinsPrefixes,
    PrefixHit,
    TieredScheduler,
    TierPort,
    TierTransfer,
)
from openinfer_kv_cache.tiers.saves import BlockSaves
from openinfer_kv_cache.tiers.table_load import TableLoad, begin_table_load
from openinfer_kv_cache.tiers.traits import (
    BlockMover,
    CopyingTier,
    DeviceBlock,
    DeviceTier,
    LastingTier,
    SharedTier,
    TellingTier,
    TierListener,
    TierMedium,
)
from openinfer_kv_cache.tiers.transfers import KvTransfers

__all__ = [
    "FP8_KV_TAG",
    "FP8_SCALE_BYTES",
    "BlockListener",
    "BlockMover",
    "BlockPin",
    "BlockPool",
    "BlockSaves",
    "BlockSequence",
    "BlockState",
    "BlockStateError",
    "BlockTable",
    "Conversations",
    "CopyKind",
    "CopyingTier",
    "DeviceBlock",
    "DeviceTier",
    "Digest",
    "EvictingTier",
    "EvictionPolicy",
    "EvictionPolicyError",
    "EvictionReason",
    "EvictsByOwner",
    "FairLeastRecentlyUsed",
    "GroupKind",
    "IntegrityError",
    "KeepsConversations",
    "KvCache",
    "KvCacheError",
    "KvCacheOptions",
    "KvConfigError",
    "KvDtype",
    "KvEventSource",
    "KvGroupLayout",
    "KvLayout",
    "KvRegion",
    "KvSpec",
    "KvTier",
    "KvTierError",
    "KvTierFactory",
    "KvTransfers",
    "LastingTier",
    "LayoutMismatchError",
    "LeastRecentlyUsed",
    "PagedGroup",
    "PagedTensor",
    "PinsPrefixes",
    "PoolCounters",
    "PrefixHasher",
    "PrefixHit",
    "RetainsBlocks",
    "SequenceStateError",
    "SharedTier",
    "StateSlotCopy",
    "StateSlotGroup",
    "StateSlotPool",
    "StateSlotStatus",
    "StateTensor",
    "StoredBlocks",
    "TableLoad",
    "TellingTier",
    "TierCondition",
    "TierCounters",
    "TierFailure",
    "TierHit",
    "TierListener",
    "TierMedium",
    "TierPort",
    "TierSettingCheck",
    "TierTransfer",
    "TieredScheduler",
    "Transfer",
    "TransferState",
    "attention_group",
    "begin_table_load",
    "check_same_layout",
    "table_digest",
    "table_digests",
]
