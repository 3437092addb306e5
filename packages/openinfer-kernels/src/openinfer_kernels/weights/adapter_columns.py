"""How adapters' B's lie where products with them are one launch: those of all slots next to each other."""

import math

CHUNK_COLUMNS = 64
"""That kernels multiply at a time."""
MOST_COLUMNS = 128
"""Each is read in every step, whether its slot has rows or not: with more, adapters are added after a product."""


def adapter_columns(num_slots: int, rank: int) -> int:
    """Columns of all slots, with whole chunks and whole slots."""
    unit = math.lcm(rank, CHUNK_COLUMNS)
    return -(-num_slots * rank // unit) * unit


def most_columns(num_slots: int, rank: int) -> int:
    """That a device may hold for the B's of all slots."""
    fused = adapter_columns(num_slots, rank)
    return fused if fused <= MOST_COLUMNS else num_slots * rank
