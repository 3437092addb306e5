"""How many blocks a sequence takes, of whose block tables some have a window."""

from collections.abc import Iterable

MAX_TABLES = 256
"""Block tables of a sequence: a table's index is one byte of a block's identity (`openinfer_kv_cache.table_digest`)."""

# Beside the blocks that a window fills: one as it may begin and end inside a block, one to write ahead.
_EXTRA_BLOCKS = 2


def blocks_for_context(num_tokens: int, table_windows: Iterable[int | None], block_size_tokens: int) -> int:
    """Blocks that a sequence of `num_tokens` tokens needs, if it gives back what lies behind its windows."""
    num_blocks = -(-num_tokens // block_size_tokens)
    return sum(
        num_blocks if window is None else min(num_blocks, -(-window // block_size_tokens) + _EXTRA_BLOCKS)
        for window in table_windows
    )
