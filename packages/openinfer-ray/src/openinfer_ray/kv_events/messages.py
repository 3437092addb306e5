"""What travels between a replica's events and its servers, next to the events themselves."""

import logging
from collections.abc import Sequence

import msgspec

from openinfer_ray.kv_events.told_prefixes import ToldPrefixes

logger = logging.getLogger("openinfer.engine")

SEQUENCE_BYTES = 8
END = b"\xff" * SEQUENCE_BYTES
"""The number of the last message of a replay."""


def read_message(frames: Sequence[bytes]) -> tuple[int, bytes]:
    """Its number and its batch; what is none of ours has no number, and is followed by a gap."""
    if len(frames) != 3 or len(frames[1]) != SEQUENCE_BYTES:
        logger.error("KV events: a message of %d frames is not [topic, sequence number, batch]", len(frames))
        return 0, b""
    return int.from_bytes(frames[1], "big"), frames[2]


def snapshot(held: ToldPrefixes) -> bytes:
    """A batch that says all that a replica holds, in the place of those that led to it."""
    stored = [
        ["BlockStored", hashes, None, [], 0, None, medium, None, None] for medium, hashes in held.by_medium().items()
    ]
    return msgspec.msgpack.encode([0.0, [["AllBlocksCleared"], *stored], 0])
