"""openinfer-nixl: KV blocks in the memory of engines or of their GPUs (`gpu/`), which read each other's through NIXL.

    save ──► Arena (memory of this process, registered with NIXL) ◄── READ ── a peer's load
    load ──► ask each peer: Lease(key) ──► address ──► NIXL READ ──► checksum ──► the caller's block

What a peer may read is told only to those that have shown the token. NIXL is imported where a tier is opened.
"""

from openinfer_nixl.gpu.settings import open_nixl_gpu
from openinfer_nixl.settings import open_nixl

__all__ = ["open_nixl", "open_nixl_gpu"]
