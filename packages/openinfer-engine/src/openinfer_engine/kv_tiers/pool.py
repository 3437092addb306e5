"""`PoolMemory`: the blocks of a rank's KV pool, and its slots of recurrent states, as tiers copy them."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from openinfer_kernels import Array
from openinfer_kv_cache.tiers.traits import BlockMemory, MemorySource


class PoolMemory(Protocol):
    """Blocks and slots of one rank, and what the device that holds them can do for memory of this machine."""

    @property
    def is_on_device(self) -> bool:
        """Whether they are `DeviceBlock`s, which only some tiers take."""
        ...

    @property
    def blocks(self) -> Sequence[BlockMemory]:
        """By block id."""
        ...

    @property
    def states(self) -> Sequence[Sequence[BlockMemory]]:
        """The chunks of each slot, each as large as a block; none without states."""
        ...

    @property
    def source(self) -> MemorySource | None:
        """Where tiers may have memory beside these blocks; None for this machine's, of which each takes its own."""
        ...

    def lock(self, memory: Sequence[memoryview]) -> None:
        """Locks memory in place, so that copies from and to it are fast."""
        ...

    def unlock(self) -> None:
        """Unlocks what was locked. Idempotent."""
        ...


class HostPool:
    """A pool in this machine's memory.

    Args:
        kv_cache: C-contiguous `[num_blocks, ...]`.
        slots: C-contiguous `[slots, bytes]` of recurrent states, each slot a whole number of a block's size.
    """

    is_on_device = False
    source = None

    def __init__(self, kv_cache: Array, slots: Array | None = None) -> None:
        self.blocks: Sequence[BlockMemory] = _chunks(kv_cache, np.asarray(kv_cache).nbytes // len(kv_cache))
        size = self.blocks[0].nbytes
        self.states: Sequence[Sequence[BlockMemory]] = () if slots is None else [_chunks(slot, size) for slot in slots]

    def lock(self, memory: Sequence[memoryview]) -> None:
        del memory

    def unlock(self) -> None:
        pass


def _chunks(array: Array, num_bytes: int) -> list[BlockMemory]:
    whole = np.asarray(array).reshape(-1).view(np.uint8).data
    return [whole[begin : begin + num_bytes] for begin in range(0, len(whole), num_bytes)]
