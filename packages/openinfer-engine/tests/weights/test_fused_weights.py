"""Tables that do not divide by the ranks: zeros at the end, and every rank gets its rows of the padded table."""

import numpy as np
import pytest
from numpy.typing import NDArray

from openinfer_engine.weights.fused import matrices_of_stack, pad_rows, rows_of_rank, stacked_rows_of_rank
from openinfer_kernels import RandomWeight, WeightPart
from openinfer_kernels.cpu import CpuOps

TABLE = np.arange(8, dtype=np.float32).reshape(4, 2) + 100
RECIPE = RandomWeight.whole((4, 2), seed=1, mean=100.0, spread=1.0)


def values(*parts: WeightPart) -> NDArray[np.float32]:
    return CpuOps().upload_weight(*parts)


@pytest.mark.parametrize("table", [TABLE, RECIPE], ids=["array", "recipe"])
@pytest.mark.parametrize(("multiple", "rows"), [(1, 4), (2, 4), (3, 6), (5, 5), (8, 8)])
def test_padding_makes_the_rows_a_multiple_and_copies_nothing(table: WeightPart, multiple: int, rows: int) -> None:
    parts = pad_rows(table, multiple)
    padded = values(*parts)
    assert parts[0] is table
    assert len(parts) == (1 if rows == 4 else 2)
    assert len(padded) == rows
    assert np.array_equal(padded[:4], values(table))
    assert not padded[4:].any()


@pytest.mark.parametrize("table", [TABLE, RECIPE], ids=["array", "recipe"])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_ranks_share_the_padded_table(table: WeightPart, size: int) -> None:
    shares = [values(*rows_of_rank(table, rank=rank, size=size)) for rank in range(size)]
    assert np.array_equal(np.concatenate(shares), values(*pad_rows(table, size)))


@pytest.mark.parametrize("table", [TABLE, RECIPE], ids=["array", "recipe"])
def test_ranks_share_each_of_the_matrices_that_lie_below_each_other(table: WeightPart) -> None:
    whole = values(table)
    shares = [values(*stacked_rows_of_rank(table, (2, 2), rank=rank, size=2)) for rank in range(2)]
    assert np.array_equal(shares[0], whole[[0, 2]])
    assert np.array_equal(shares[1], whole[[1, 3]])


@pytest.mark.parametrize(
    "stack",
    [np.arange(24, dtype=np.float32).reshape(4, 2, 3), RandomWeight.whole((4, 2, 3), seed=1, mean=0.0, spread=1.0)],
    ids=["array", "recipe"],
)
def test_some_matrices_of_a_stack_are_below_each_other(stack: WeightPart) -> None:
    whole = values(stack)
    assert whole.shape == (4, 2, 3)
    np.testing.assert_array_equal(values(matrices_of_stack(stack, range(1, 3))), whole[1:3].reshape(4, 3))
