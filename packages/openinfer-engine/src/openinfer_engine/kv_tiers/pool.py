"""`PoolMemory`: the blocks of a rank's KV pool as tiers copy them."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from openinfer_kernels import Array
from openinfer_kv_cache.tier_traits import BlockMemory


class PoolMemory(Protocol):
    """Blocks of one pool, and what the device that holds them can do for memory of this machine."""

    @property
    def is_on_device(self) -> bool:
        """Whether they are `DeviceBlock`s, which only some tiers take."""
        ...

    @property
    def blocks(self) -> Sequence[BlockMemory]:
        """By block id."""
        ...

    def lock(self, memory: Sequence[memoryview]) -> None:
        """Locks memory in place, so that copies from and to it are fast."""
        ...

    def unlock(self) -> None:
        """Unlocks what was locked. Idempotent."""
        ...


class HostPool:
    """A pool in this machine's memory: a C-contiguous NumPy array `[num_blocks, ...]`."""

    is_on_device = False

    def __init__(self, pool: Array) -> None:
        whole = np.asarray(pool).reshape(-1).view(np.uint8).data
        size = len(whole) // len(pool)
        self.blocks: Sequence[BlockMemory] = [whole[begin : begin + size] for begin in range(0, len(whole), size)]

    def lock(self, memory: Sequence[memoryview]) -> None:
        """Nothing to do."""
        del memory

    def unlock(self) -> None:
        """Nothing to do."""
