"""`BlockStamps`: what a place in memory is compared with when it is read, wherever its block came from.

    from this machine's memory    XXH3-128 of layout, digest and bytes (`format/checksum.py`)
    from a device                 a mark, and the sum that the device made of its bytes (`device_checksum.py`)

A place and its digest are bound by the tier's index, which lives as long as the memory does.
"""

from collections.abc import Sequence

from openinfer_kv_cache import DeviceBlock, Digest, KvLayout
from openinfer_kv_offload.format.checksum import Stamper
from openinfer_kv_offload.host.block_index import Stored
from openinfer_kv_offload.host.device_checksum import block_sum

_DEVICE_MARK = b"device "


class BlockStamps:
    """Makes and checks the stamps of one layout's blocks in memory."""

    __slots__ = ("_stamper",)

    def __init__(self, layout: KvLayout) -> None:
        self._stamper = Stamper(layout)

    def stamp(self, digest: Digest, block: memoryview) -> bytes:
        """Of a block in this machine's memory."""
        return self._stamper.stamp(digest, block)

    def fits(self, digest: Digest, block: memoryview, stamp: bytes) -> bool:
        """Whether memory holds what was stamped."""
        if stamp.startswith(_DEVICE_MARK):
            return block_sum(block) == stamp.removeprefix(_DEVICE_MARK)
        return self._stamper.fits(digest, block, stamp)

    def copy_out(self, blocks: Sequence[DeviceBlock], places: Sequence[memoryview]) -> list[bytes]:
        """Copies a device's blocks to places; returns their stamps."""
        return [_DEVICE_MARK + each for each in blocks[0].mover.copy_out(blocks, places)]

    def copy_in(
        self, batch: Sequence[Stored], blocks: Sequence[DeviceBlock], places: Sequence[memoryview]
    ) -> list[bool]:
        """Copies places to a device's blocks; returns of each whether its bytes are right."""
        sums = blocks[0].mover.copy_in(blocks, places)
        return [
            stored.stamp == _DEVICE_MARK + found
            if stored.stamp.startswith(_DEVICE_MARK)
            else self._stamper.fits(stored.digest, place, stored.stamp)
            for stored, place, found in zip(batch, places, sums, strict=True)
        ]
