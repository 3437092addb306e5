"""`HostMemory`: a tier's memory where the pool's blocks are in this machine's."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from openinfer_kv_cache.tiers.traits import BlockMemory, Medium
from openinfer_kv_offload.host.checksums import block_sum
from openinfer_kv_offload.transfer.memory import WrapMedium, copy_bytes


class HostMemory:
    """As `TierMemory`; blocks of a device that is none of ours are copied by their mover.

    Args:
        num_bytes: of it.
        wrap_medium: what the copies go through.
    """

    device = 0

    def __init__(self, num_bytes: int, *, wrap_medium: WrapMedium) -> None:
        self._memory: NDArray[np.uint8] = np.zeros(num_bytes, np.uint8)
        self._medium: Medium = wrap_medium(self)

    @property
    def address(self) -> int:
        return self._memory.ctypes.data

    def use(self) -> None:
        """No device is asked for."""

    def copy_out(self, blocks: Sequence[BlockMemory], offsets_bytes: Sequence[int]) -> list[bytes]:
        return [self._copy_out(block, offset) for block, offset in zip(blocks, offsets_bytes, strict=True)]

    def copy_in(self, blocks: Sequence[BlockMemory], offsets_bytes: Sequence[int]) -> list[bytes]:
        return [self._copy_in(block, offset) for block, offset in zip(blocks, offsets_bytes, strict=True)]

    def write(self, offset_bytes: int, parts: Sequence[memoryview]) -> None:
        for part in parts:
            copy_bytes(self._view(offset_bytes, len(part)), part)
            offset_bytes += len(part)

    def read(self, offset_bytes: int, into: memoryview) -> None:
        copy_bytes(into, self._view(offset_bytes, len(into)))

    def close(self) -> None:
        """It goes with the last reference to it."""

    def _copy_out(self, block: BlockMemory, offset_bytes: int) -> bytes:
        if isinstance(block, memoryview):
            self._medium.write(offset_bytes, [block])
            return block_sum(block)
        return block.mover.copy_out([block], [self._view(offset_bytes, block.nbytes)])[0]

    def _copy_in(self, block: BlockMemory, offset_bytes: int) -> bytes:
        if isinstance(block, memoryview):
            self._medium.read(offset_bytes, block)
            return block_sum(block)
        return block.mover.copy_in([block], [self._view(offset_bytes, block.nbytes)])[0]

    def _view(self, offset_bytes: int, num_bytes: int) -> memoryview:
        return self._memory.data[offset_bytes : offset_bytes + num_bytes]
