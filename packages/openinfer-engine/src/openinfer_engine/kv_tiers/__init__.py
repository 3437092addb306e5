"""KV tiers in the engine: which ones, and the traffic between them and the pool.

choice.py   `--kv-tier`: plug-ins and settings, what they are refused for, and opening them
port.py     TierPort: loads and saves of the pool's blocks, all that a scheduler and the loop ask
move.py     BlockMove: some blocks on their way
"""

from openinfer_engine.kv_tiers.choice import ChosenTiers, choose_tiers
from openinfer_engine.kv_tiers.move import BlockMove
from openinfer_engine.kv_tiers.port import TieredScheduler, TierPort

__all__ = ["BlockMove", "ChosenTiers", "TierPort", "TieredScheduler", "choose_tiers"]
