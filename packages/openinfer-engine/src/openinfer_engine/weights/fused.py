"""Tables whose rows do not divide by the ranks, or that hold several matrices."""

from collections.abc import Sequence

import numpy as np

from openinfer_kernels import WeightPart


def pad_rows(table: WeightPart, multiple: int) -> tuple[WeightPart, ...]:
    """The parts of `table` with rows of zeros at its end, so that their number is a multiple."""
    return with_zeros(table, -len(table) % multiple)


def rows_of_rank(table: WeightPart, *, rank: int, size: int) -> tuple[WeightPart, ...]:
    """The parts of one rank's share of the rows of `table`, which is padded with zeros as `pad_rows` does it."""
    share = -(-len(table) // size)
    begin, end = (min(edge * share, len(table)) for edge in (rank, rank + 1))
    return with_zeros(_rows(table, begin, end), share - (end - begin))


def stacked_rows_of_rank(table: WeightPart, heights: Sequence[int], *, rank: int, size: int) -> tuple[WeightPart, ...]:
    """One rank's rows of each of the matrices that lie below each other in `table`; `size` divides all `heights`."""
    pieces: list[WeightPart] = []
    begin = 0
    for height in heights:
        share = height // size
        pieces.append(_rows(table, begin + rank * share, begin + (rank + 1) * share))
        begin += height
    return tuple(pieces)


def with_zeros(table: WeightPart, rows: int) -> tuple[WeightPart, ...]:
    """The parts of `table` with so many more rows."""
    return (table, np.zeros((rows, *table.shape[1:]), np.uint16)) if rows else (table,)


def matrices_of_stack(stack: WeightPart, matrices: range) -> WeightPart:
    """Some of the matrices `[E, out, in]` that are next to each other, below each other: two axes."""
    some = _rows(stack, matrices.start, matrices.stop)
    return some.reshape(-1, some.shape[-1]) if isinstance(some, np.ndarray) else some.flattened()


def _rows(table: WeightPart, begin: int, end: int) -> WeightPart:
    return table[begin:end] if isinstance(table, np.ndarray) else table.rows(begin, end)
