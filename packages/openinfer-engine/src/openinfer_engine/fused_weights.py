"""Weights that a model keeps as one matrix and a checkpoint as several, and tables that do not divide by the ranks."""

from collections.abc import Sequence

import numpy as np

from openinfer_core import InvalidCheckpoint
from openinfer_engine.model import Cut, WeightSource
from openinfer_kernels import HostArray


def read_stacked(weights: WeightSource, names: Sequence[str], cut: Cut) -> HostArray:
    """This rank's pieces of several tensors, one below the other: cut first, then stacked.

    Raises:
        InvalidCheckpoint: a tensor is missing or cannot be cut, or they are not of one dtype.
    """
    pieces = [weights.read(name, cut) for name in names]
    dtypes = {piece.dtype for piece in pieces}
    if len(dtypes) > 1:
        found = ", ".join(f"{name} is {piece.dtype}" for name, piece in zip(names, pieces, strict=True))
        raise InvalidCheckpoint(f"tensors that are computed as one must be of one dtype (uint16 is BF16): {found}")
    return np.concatenate(pieces)


def pad_rows(table: HostArray, multiple: int) -> HostArray:
    """`table` with rows of zeros at its end, so that their number is a multiple; itself, if it is one already."""
    missing = -len(table) % multiple
    if not missing:
        return table
    return np.concatenate([table, np.zeros((missing, *table.shape[1:]), table.dtype)])
