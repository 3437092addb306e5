"""The checksum of a stored block, bound to what the bytes are.

    checksum = XXH3-128(layout digest, 16 bytes ‖ block digest, 16 bytes ‖ the block's bytes)

A block that comes back under another digest, or was written under another layout, fails as surely as a flipped bit.
XXH3 finds faults; it does not stop an attacker who may write to the store, nor would any checksum without a secret.
It reads memory many times faster than BLAKE2b does, and without the interpreter's lock.
"""

import xxhash

from openinfer_kv_cache import Digest, KvLayout
from openinfer_kv_offload.format.record import RecordHeader


class BlockChecksum:
    """Makes and checks the checksums of one layout's blocks."""

    __slots__ = ("layout_digest",)

    def __init__(self, layout: KvLayout) -> None:
        self.layout_digest = bytes.fromhex(layout.digest)

    def checksum(self, digest: Digest, block: memoryview) -> bytes:
        hasher = xxhash.xxh3_128(self.layout_digest + digest)
        hasher.update(block)
        return hasher.digest()

    def matches(self, digest: Digest, block: memoryview, checksum: bytes) -> bool:
        return self.checksum(digest, block) == checksum

    def header(self, digest: Digest, block: memoryview) -> RecordHeader:
        return RecordHeader(self.layout_digest, digest, len(block), self.checksum(digest, block))

    def is_intact(self, digest: Digest, header: RecordHeader | None, block: memoryview) -> bool:
        """Whether a record is whole and of this block and layout; None is a header that could not be read."""
        return (
            header is not None
            and header.digest == digest
            and header.layout_digest == self.layout_digest
            and header.payload_bytes == len(block)
            and self.matches(digest, block, header.checksum)
        )
