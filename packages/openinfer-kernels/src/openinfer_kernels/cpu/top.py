"""The largest entries of a row."""

from typing import Any

import numpy as np
from numpy.typing import NDArray


def top_ids(row: NDArray[Any], count: int) -> NDArray[np.intp]:
    """Ids of the `count` largest entries of `row [n]` without NaN, largest first, equal ones by lower id."""
    if count >= row.shape[0]:
        return np.argsort(-row, kind="stable")
    threshold = np.partition(row, row.shape[0] - count)[row.shape[0] - count]
    ids = np.flatnonzero(row >= threshold)
    return ids[np.argsort(-row[ids], kind="stable")[:count]]
