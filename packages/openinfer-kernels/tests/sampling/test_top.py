import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from openinfer_kernels.cpu.sampling.top import largest_ids, top_ids

ROWS = st.lists(st.sampled_from([-np.inf, -2.0, -0.0, 0.0, 1.0, 1.5, 3.0]), min_size=1, max_size=40)


@given(values=ROWS, count=st.integers(1, 45))
def test_top_ids_equal_a_stable_sort(values, count):
    row = np.array(values, np.float32)
    expected = sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]
    assert top_ids(row, count).tolist() == expected
    assert largest_ids(row, count).tolist() == sorted(expected)


@pytest.mark.parametrize("count", [1, 20, 4000, 4096])
def test_top_ids_of_a_large_row(count):
    row = np.random.default_rng(0).normal(size=4096).astype(np.float32)
    assert top_ids(row, count).tolist() == np.argsort(-row, kind="stable")[:count].tolist()
