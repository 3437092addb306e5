"""KV tiers in the engine: which ones, and the traffic between them and the pool.

choice.py   `--kv-tier`: plug-ins and settings, what they are refused for, and opening them
pool.py     PoolMemory: the pool's blocks as tiers copy them
joining.py  tiers, pool and scheduler put together; page_taking.py: a tier's memory, taken beside the weights
port.py     TierPort: loads and saves of the pool's blocks and states, all that a scheduler and the loop ask
found.py    FoundBlocks: what tiers hold for a load; move.py: BlockMove, some blocks on their way
"""

from openinfer_engine.kv_tiers.choice import ChosenTiers, OpenTiers, choose_tiers
from openinfer_engine.kv_tiers.found import FoundBlocks
from openinfer_engine.kv_tiers.joining import join_tiers, require_tiered, take_pages
from openinfer_engine.kv_tiers.move import BlockMove
from openinfer_engine.kv_tiers.page_taking import PageTaking
from openinfer_engine.kv_tiers.port import TieredScheduler, TierPort

__all__ = [
    "BlockMove",
    "ChosenTiers",
    "FoundBlocks",
    "OpenTiers",
    "PageTaking",
    "TierPort",
    "TieredScheduler",
    "choose_tiers",
    "join_tiers",
    "require_tiered",
    "take_pages",
]
