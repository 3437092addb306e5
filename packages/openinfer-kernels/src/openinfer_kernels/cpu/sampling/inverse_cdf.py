"""Drawing columns by inverting the cumulative distribution of each row.

Many weights are summed in blocks, then within the one block that the draw fell into: a running sum over a
vocabulary takes ten times as long. All sums are float64, in an order that depends on the row's length only.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

_BLOCK = 128


def drawn_columns(weights: NDArray[Any], numbers: NDArray[np.float64]) -> NDArray[np.intp]:
    """First column of each row whose running sum exceeds `number` times the row's sum; its weight is positive.

    Args:
        weights: `[R, n]` float32, not negative, at least one of each row positive.
        numbers: `[R]` in [0, 1).
    """
    rows = np.arange(len(weights))
    blocks = _whole_blocks(weights)
    ends = np.cumsum(blocks.sum(axis=2, dtype=np.float64), axis=1)
    targets = numbers * ends[:, -1]
    block_ids = np.count_nonzero(ends <= targets[:, None], axis=1)
    before = np.where(block_ids > 0, ends[rows, block_ids - 1], 0.0)
    inner = blocks[rows, block_ids]
    running = np.cumsum(inner, axis=1, dtype=np.float64)
    columns = np.count_nonzero(running <= (targets - before)[:, None], axis=1)
    # Rounding may put the target at or beyond the block's own sum: then its last column of positive weight is drawn.
    last_positive = _BLOCK - 1 - np.argmax(inner[:, ::-1] > 0, axis=1)
    return block_ids * _BLOCK + np.minimum(columns, last_positive)


def drawn_column(weights: NDArray[Any], number: float) -> int:
    """The same for one row of few `weights [n]`, with one running sum."""
    running = np.cumsum(weights, dtype=np.float64)
    return int(running.searchsorted(float(number * running[-1]), side="right"))


def _whole_blocks(weights: NDArray[Any]) -> NDArray[Any]:
    """`[R, n]` as `[R, blocks, _BLOCK]`, zeros after the last column."""
    missing = -weights.shape[1] % _BLOCK
    if missing:
        padded = np.zeros((weights.shape[0], weights.shape[1] + missing), weights.dtype)
        padded[:, :-missing] = weights
        weights = padded
    return weights.reshape(weights.shape[0], -1, _BLOCK)
