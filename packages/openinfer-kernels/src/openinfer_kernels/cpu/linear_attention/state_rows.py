"""Rows of a step as operators over recurrent states see them: those of one token, and longer ones."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from openinfer_kernels.errors import ArrayMismatchError
from openinfer_kernels.ops import AttentionBatch


@dataclass(frozen=True, slots=True)
class SingleRows:
    """The rows of one token, which are computed together."""

    rows: NDArray[np.intp]
    first_tokens: NDArray[Any]
    """Their tokens."""
    begins: NDArray[np.bool_]
    """Whether each begins its sequence, so that its slot holds nothing of it."""


def batch_slots(batch: AttentionBatch) -> NDArray[Any]:
    """`[R]` state slot of each row; raises `ArrayMismatchError` for a batch of a model without states."""
    if batch.state_slots is None:
        raise ArrayMismatchError("the batch has no state_slots; an operator over recurrent states needs them")
    return batch.state_slots


def single_rows(batch: AttentionBatch) -> SingleRows:
    rows = np.flatnonzero(np.diff(batch.query_starts) == 1)
    return SingleRows(rows, batch.query_starts[rows], batch.context_lens[rows] == 1)


def long_rows(batch: AttentionBatch) -> Iterator[tuple[int, slice, bool]]:
    """Row, its tokens, and whether it begins its sequence, of every row of several tokens."""
    counts = np.diff(batch.query_starts)
    for row in np.flatnonzero(counts > 1).tolist():
        tokens = slice(int(batch.query_starts[row]), int(batch.query_starts[row + 1]))
        yield row, tokens, bool(batch.context_lens[row] == counts[row])


def read_states(state: NDArray[Any], layer: int, slots: NDArray[Any], begins: NDArray[np.bool_]) -> NDArray[Any]:
    """Copies of the states `[n, ...]` in `slots [n]` of one layer; zeros where a sequence begins."""
    found = state[slots, layer]
    found[begins] = 0.0
    return found
