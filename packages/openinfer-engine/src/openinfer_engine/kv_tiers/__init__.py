"""KV tiers in the engine: which ones, and the traffic between them and the pool.

choice.py   `--kv-tier`: plug-ins and settings, what they are refused for, and opening them
pool.py     PoolMemory: a pool's blocks and states as tiers copy them
joining.py  tiers and pools put together; prefault.py: a tier's memory, taken while weights are read
port.py     PoolTierPort: loads and saves of the pool's blocks and states, as `openinfer_kv_cache.TierPort` has them
transfer.py what is on its way
share.py    RankShare: another rank's share of it, in this process (local_share.py) or another (remote_share.py asks,
            share_service.py answers); remote_port.py: RemoteTierPort, of a rank there that has a scheduler of its own
contents.py TierContents: what the tiers of such a rank tell that they hold
"""

from openinfer_engine.kv_tiers.choice import ChosenTiers, OpenTiers, choose_tiers, read_digest_key
from openinfer_engine.kv_tiers.contents import TierContents
from openinfer_engine.kv_tiers.joining import begin_prefault, open_port, require_tiered
from openinfer_engine.kv_tiers.local_share import LocalShare
from openinfer_engine.kv_tiers.port import PoolTierPort
from openinfer_engine.kv_tiers.prefault import MemoryPrefault
from openinfer_engine.kv_tiers.remote_port import RemoteTierPort
from openinfer_engine.kv_tiers.share import RankShare, TellingShare

__all__ = [
    "ChosenTiers",
    "LocalShare",
    "MemoryPrefault",
    "OpenTiers",
    "PoolTierPort",
    "RankShare",
    "RemoteTierPort",
    "TellingShare",
    "TierContents",
    "begin_prefault",
    "choose_tiers",
    "open_port",
    "read_digest_key",
    "require_tiered",
]
