"""The checksum of a stored block, bound to what the bytes are.

    stamp = XXH3-128(layout digest, 16 bytes ‖ block digest, 16 bytes ‖ the block's bytes)

A block that comes back under another digest, or was written under another layout, fails as surely as a flipped bit.
XXH3 finds faults; it does not stop someone who may write to the store, nor would any checksum without a secret.
It reads memory many times faster than BLAKE2b does, and without the interpreter's lock.
"""

import xxhash

from openinfer_kv_cache import Digest, KvLayout
from openinfer_kv_offload.format.record import RecordHeader

STAMP_BYTES = 16


class Stamper:
    """Makes and checks the stamps of one layout's blocks."""

    __slots__ = ("layout_digest",)

    def __init__(self, layout: KvLayout) -> None:
        self.layout_digest = bytes.fromhex(layout.digest)

    def stamp(self, digest: Digest, block: memoryview) -> bytes:
        """The 16 bytes to keep beside `block`."""
        hasher = xxhash.xxh3_128(self.layout_digest + digest)
        hasher.update(block)
        return hasher.digest()

    def fits(self, digest: Digest, block: memoryview, stamp: bytes) -> bool:
        """Whether `block` is what was stamped."""
        return self.stamp(digest, block) == stamp

    def header(self, digest: Digest, block: memoryview) -> RecordHeader:
        """What to write in front of `block`."""
        return RecordHeader(self.layout_digest, digest, len(block), self.stamp(digest, block))

    def is_intact(self, digest: Digest, header: RecordHeader | None, block: memoryview) -> bool:
        """Whether a record is whole and of this block and layout; None is a header that could not be read."""
        return (
            header is not None
            and header.digest == digest
            and header.layout_digest == self.layout_digest
            and header.payload_bytes == len(block)
            and self.fits(digest, block, header.stamp)
        )
