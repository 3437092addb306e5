import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from openinfer_kernels.cpu.sampling.inverse_cdf import drawn_column, drawn_columns

LARGEST = 1 - 2.0**-32


def naive_column(weights: list[float], number: float) -> int:
    target, running = number * sum(weights), 0.0
    for column, weight in enumerate(weights):
        running += weight
        if running > target:
            return column
    raise AssertionError("the number is below one")


@given(data=st.data(), num_columns=st.sampled_from([1, 2, 127, 128, 129, 256, 300]))
def test_drawn_columns_of_whole_weights_equal_a_loop(data, num_columns):
    seed = data.draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    weights = rng.integers(0, 3, size=(5, num_columns)).astype(np.float32)
    weights[:, rng.integers(num_columns)] = 1.0
    numbers = np.array([0.0, 0.25, 0.5, 0.75, LARGEST])
    expected = [naive_column(row.tolist(), number) for row, number in zip(weights, numbers, strict=True)]
    assert drawn_columns(weights, numbers).tolist() == expected
    assert [drawn_column(row, number) for row, number in zip(weights, numbers, strict=True)] == expected


@pytest.mark.parametrize("number", [0.0, 0.3, LARGEST])
@pytest.mark.parametrize("column", [0, 5, 127, 128, 255, 256, 999])
def test_drawn_columns_only_ever_give_a_positive_weight(number, column):
    weights = np.zeros((1, 1000), np.float32)
    weights[0, column] = 1e-30
    assert drawn_columns(weights, np.array([number])).tolist() == [column]
    assert drawn_column(weights[0], number) == column


def test_drawn_columns_of_weights_of_every_magnitude_are_positive_ones():
    rng = np.random.default_rng(0)
    weights = np.exp(rng.uniform(-80, 0, size=(2000, 391))).astype(np.float32)
    weights[rng.random(weights.shape) < 0.7] = 0.0
    weights[:, 200] = 1e-6
    numbers = rng.random(2000)
    numbers[::3] = LARGEST
    columns = drawn_columns(weights, numbers)
    assert (weights[np.arange(2000), columns] > 0).all()


def test_drawn_columns_where_two_sums_of_a_block_round_apart_are_positive_ones():
    # Half of the sum is the end of the first block up to rounding; the columns beside the border have no weight.
    rng = np.random.default_rng(0)
    first = np.exp(rng.uniform(-20, 0, size=(2000, 128))).astype(np.float32)
    first[:, 127] = 0.0
    second = np.roll(first, 1, axis=1)
    second[:, 1:] = rng.permuted(second[:, 1:], axis=1)
    weights = np.concatenate([first, second], axis=1)
    columns = drawn_columns(weights, np.full(2000, 0.5))
    assert (weights[np.arange(2000), columns] > 0).all()
    assert set(columns.tolist()) == {126, 129}
