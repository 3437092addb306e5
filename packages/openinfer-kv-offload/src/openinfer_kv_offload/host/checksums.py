"""`HostChecksums`: what a block in memory is compared with when it is read, wherever it came from.

    from this machine's memory    XXH3-128 of layout, digest and bytes (`format/checksum.py`)
    from a device                 a mark, and the sum that the device made of its bytes (`device_checksum.py`)

An arena's block and its digest are bound by the tier's index, which lives as long as the memory does.
"""

from collections.abc import Sequence

from openinfer_kv_cache import DeviceBlock, Digest, KvLayout
from openinfer_kv_offload.format.checksum import BlockChecksum
from openinfer_kv_offload.host.block_index import Stored
from openinfer_kv_offload.host.device_checksum import block_sum

_DEVICE_MARK = b"device "


class HostChecksums:
    """Makes and checks the checksums of one layout's blocks in memory."""

    __slots__ = ("_checksum",)

    def __init__(self, layout: KvLayout) -> None:
        self._checksum = BlockChecksum(layout)

    def checksum(self, digest: Digest, block: memoryview) -> bytes:
        """Of a block in this machine's memory."""
        return self._checksum.checksum(digest, block)

    def matches(self, digest: Digest, block: memoryview, checksum: bytes) -> bool:
        """Whether memory holds what was checksummed."""
        if checksum.startswith(_DEVICE_MARK):
            return block_sum(block) == checksum.removeprefix(_DEVICE_MARK)
        return self._checksum.matches(digest, block, checksum)

    def copy_out(self, blocks: Sequence[DeviceBlock], into: Sequence[memoryview]) -> list[bytes]:
        """Copies a device's blocks into the arena; returns their checksums."""
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
