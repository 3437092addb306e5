"""The bytes of one block in a segment file.

    0    8   magic "OIKVREC1"
    8   16   layout digest
    24  16   block digest
    40   8   payload bytes, little-endian
    48  16   checksum of the payload (`checksum.py`)
    64   8   XXH3-64 of the 64 bytes before
    72  56   zero
    128      payload, then zeros to a multiple of 4096

All records of a store have one size, so that record `i` is at `i * record_bytes` whatever the ones before look like.
"""

import struct
from typing import NamedTuple

import xxhash

from openinfer_kv_cache import Digest

HEADER_BYTES = 128
PAGE_BYTES = 4096
_MAGIC = b"OIKVREC1"
_FIELDS = struct.Struct("<8s16s16sQ16s")
_CHECK = struct.Struct("<Q")


class RecordHeader(NamedTuple):
    """What a record says of its payload."""

    layout_digest: bytes
    digest: Digest
    payload_bytes: int
    checksum: bytes


def record_bytes(block_bytes: int) -> int:
    return -(-(HEADER_BYTES + block_bytes) // PAGE_BYTES) * PAGE_BYTES


def encode_header(header: RecordHeader) -> bytes:
    fields = _FIELDS.pack(_MAGIC, *header)
    return (fields + _CHECK.pack(xxhash.xxh3_64_intdigest(fields))).ljust(HEADER_BYTES, b"\0")


def decode_header(encoded: bytes | memoryview) -> RecordHeader | None:
    """Decodes what `encode_header` has returned; None if these bytes are no whole header."""
    if len(encoded) < HEADER_BYTES:
        return None
    fields = bytes(encoded[: _FIELDS.size])
    (check,) = _CHECK.unpack_from(encoded, _FIELDS.size)
    if check != xxhash.xxh3_64_intdigest(fields):
        return None
    magic, layout_digest, digest, payload_bytes, checksum = _FIELDS.unpack(fields)
    return RecordHeader(layout_digest, Digest(digest), payload_bytes, checksum) if magic == _MAGIC else None
