"""KV tiers: places that keep blocks outside the pool, and what an engine and its scheduler ask of them.

contract.py     `KvTier`, its hits, transfers, counters and factory
traits.py       what a tier may be able to do beyond that
closing.py      ends of tiers within a time
port.py         `TierPort`: tiers as a scheduler sees them; what a scheduler with tiers and KV events offers
early_fill.py   `EarlyFill`: blocks on their way for no sequence
transfers.py    `KvTransfers`: loads and saves of a scheduler of whole sequences; table_load.py, saves.py are its parts
"""

from openinfer_kv_cache.tiers.contract import (
    KV_TIERS,
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

__all__ = [
    "KV_TIERS",
    "EvictingTier",
    "KvTier",
    "KvTierFactory",
    "TierCondition",
    "TierCounters",
    "TierFailure",
    "TierHit",
    "TierSettingCheck",
    "Transfer",
    "TransferState",
]
