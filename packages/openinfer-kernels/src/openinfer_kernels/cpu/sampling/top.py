"""The largest entries of a row, without sorting the row."""

from typing import Any

import numpy as np
from numpy.typing import NDArray


def largest_ids(row: NDArray[Any], count: int) -> NDArray[np.intp]:
    """Ids of the `count` largest entries of `row [n]`, in order of id; of equal entries the lower ids are taken.

    The row holds no NaN; all ids are returned where `count >= n`.
    """
    first = len(row) - count
    if first <= 0:
        return np.arange(len(row))
    threshold = np.partition(row, first)[first]
    ids = np.flatnonzero(row >= threshold)
    surplus = ids.shape[0] - count
    if surplus:
        ids = np.delete(ids, np.flatnonzero(row[ids] == threshold)[-surplus:])
    return ids


def top_ids(row: NDArray[Any], count: int) -> NDArray[np.intp]:
    """The same ids, largest entry first, equal entries by lower id."""
    ids = largest_ids(row, count)
    return ids[np.argsort(-row[ids], kind="stable")]
