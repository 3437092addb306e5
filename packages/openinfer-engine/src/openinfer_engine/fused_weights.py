"""Tables whose rows do not divide by the ranks."""

import numpy as np

from openinfer_kernels import RandomWeight, WeightPart


def pad_rows(table: WeightPart, multiple: int) -> tuple[WeightPart, ...]:
    """The parts of `table` with rows of zeros at its end, so that their number is a multiple."""
    return _with_zeros(table, -len(table) % multiple)


def rows_of_rank(table: WeightPart, *, rank: int, size: int) -> tuple[WeightPart, ...]:
    """The parts of one rank's share of the rows of `table`, which is padded with zeros as `pad_rows` does it."""
    share = -(-len(table) // size)
    begin, end = (min(edge * share, len(table)) for edge in (rank, rank + 1))
    piece = table.rows(begin, end) if isinstance(table, RandomWeight) else table[begin:end]
    return _with_zeros(piece, share - (end - begin))


def _with_zeros(table: WeightPart, rows: int) -> tuple[WeightPart, ...]:
    """`table` and so many rows of zeros, as BF16 bits."""
    return (table, np.zeros((rows, *table.shape[1:]), np.uint16)) if rows else (table,)
