"""Prefill and decode apart: KV that one engine leaves in a tier for another, by the content of its blocks.

params.py     what a request asks and what its answer says
look_ups.py   before a request runs: the tier is asked for what other engines have saved of its prompt
handovers.py  after it has run: its answer waits until its prompt's blocks are in the tier
transfer.py   `KvTransfer`: both, as the loop uses them
checks.py     what an engine is refused for that is to hand its KV on
"""

from openinfer_engine.kv_transfer.checks import require_pins, require_whole_prefixes
from openinfer_engine.kv_transfer.handovers import Handovers
from openinfer_engine.kv_transfer.transfer import KvTransfer

__all__ = ["Handovers", "KvTransfer", "require_pins", "require_whole_prefixes"]
