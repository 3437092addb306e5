"""`HostChecksums`: what a block in memory is compared with when it is read, wherever it came from.

    from this machine's memory    XXH3-128 of layout, digest and bytes (`format/checksum.py`)
    from a device                 a mark, and the sum that the device made of its bytes (`BlockMover` has the formula)

An arena's block and its digest are bound by the tier's index, which lives as long as the memory does.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from openinfer_kv_cache import DeviceBlock, Digest, KvLayout
from openinfer_kv_offload.format.checksum import BlockChecksum
from openinfer_kv_offload.host.block_index import Stored

_STEP = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIERS = (np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53))
_SHIFT = np.uint64(33)
_CHUNK_WORDS = 1 << 13  # what is made of so many words stays in a processor's cache


def block_sum(block: memoryview) -> bytes:
    """The 16 bytes that `BlockMover` defines, made by this machine, for bytes that leave another way."""
    content = np.frombuffer(block, np.uint8)
    words = np.zeros(-(-len(content) // 8), "<u8")
    words.view(np.uint8)[: len(content)] = content
    sums = np.zeros(2, np.uint64)
    for begin in range(0, len(words), _CHUNK_WORDS):
        sums += _chunk_sums(words[begin : begin + _CHUNK_WORDS], begin)
    return sums.astype("<u8").tobytes()


def _chunk_sums(words: "np.ndarray[Any, Any]", begin: int) -> "np.ndarray[Any, Any]":
    indices = np.arange(begin, begin + len(words), dtype=np.uint64)
    mixed = words + (indices + np.uint64(1)) * _STEP
    for multiplier in _MULTIPLIERS:
        mixed ^= mixed >> _SHIFT
        mixed *= multiplier
    mixed ^= mixed >> _SHIFT
    weights = np.uint64(2) * indices + np.uint64(1)
    return np.array([mixed.sum(dtype=np.uint64), (mixed * weights).sum(dtype=np.uint64)], np.uint64)


# No XXH3-128 digest begins like this but by a chance of 2^-56; then the block is a miss.
_DEVICE_MARK = b"device "


class HostChecksums:
    """Makes and checks the checksums of one layout's blocks in memory."""

    __slots__ = ("_checksum",)

    def __init__(self, layout: KvLayout) -> None:
        self._checksum = BlockChecksum(layout)

    def checksum(self, digest: Digest, block: memoryview) -> bytes:
        return self._checksum.checksum(digest, block)

    def matches(self, digest: Digest, block: memoryview, checksum: bytes) -> bool:
        if checksum.startswith(_DEVICE_MARK):
            return block_sum(block) == checksum.removeprefix(_DEVICE_MARK)
        return self._checksum.matches(digest, block, checksum)

    def copy_out(self, blocks: Sequence[DeviceBlock], into: Sequence[memoryview]) -> list[bytes]:
        return [_DEVICE_MARK + each for each in blocks[0].mover.copy_out(blocks, into)]

    def copy_in(
        self, batch: Sequence[Stored], blocks: Sequence[DeviceBlock], content: Sequence[memoryview]
    ) -> list[bool]:
        """Copies the arena's blocks to a device's; returns of each whether its bytes are right."""
        sums = blocks[0].mover.copy_in(blocks, content)
        return [
            stored.checksum == _DEVICE_MARK + found
            if stored.checksum.startswith(_DEVICE_MARK)
            else self._checksum.matches(stored.digest, memory, stored.checksum)
            for stored, memory, found in zip(batch, content, sums, strict=True)
        ]
