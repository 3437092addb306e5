"""Fused weights: pieces are cut before they are stacked, dtypes never mix, and padding is zeros at the end."""

import numpy as np
import pytest
from numpy.typing import NDArray

from openinfer_core import InvalidCheckpoint
from openinfer_engine.checkpoint import cut_for_rank
from openinfer_engine.fused_weights import pad_rows, read_stacked
from openinfer_engine.model import Cut

TENSORS: dict[str, NDArray[np.generic]] = {
    "q": np.arange(16, dtype=np.float32).reshape(8, 2),
    "k": np.arange(8, dtype=np.float32).reshape(4, 2) + 100,
    "bits": np.zeros((4, 2), np.uint16),
}


class Weights:
    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def read(self, name: str, cut: Cut = Cut.WHOLE) -> NDArray[np.generic]:
        return cut_for_rank(TENSORS[name], name, cut, rank=self._rank, size=self._size)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_each_rank_gets_its_rows_of_every_tensor(size: int) -> None:
    for rank in range(size):
        stacked = read_stacked(Weights(rank, size), ["q", "k"], Cut.ROWS)
        q, k = np.split(stacked, [8 // size])
        assert np.array_equal(q, np.split(TENSORS["q"], size)[rank])
        assert np.array_equal(k, np.split(TENSORS["k"], size)[rank])


def test_bf16_bits_are_never_stacked_with_numbers() -> None:
    with pytest.raises(InvalidCheckpoint, match=r"of one dtype .*: q is float32, bits is uint16"):
        read_stacked(Weights(0, 1), ["q", "bits"], Cut.ROWS)


@pytest.mark.parametrize(("multiple", "rows"), [(1, 4), (2, 4), (3, 6), (5, 5), (8, 8)])
def test_padding_makes_the_rows_a_multiple_and_copies_only_if_it_must(multiple: int, rows: int) -> None:
    padded = pad_rows(TENSORS["k"], multiple)
    assert len(padded) == rows
    assert np.array_equal(padded[:4], TENSORS["k"])
    assert not padded[4:].any()
    assert padded.dtype == TENSORS["k"].dtype
    assert (padded is TENSORS["k"]) == (rows == 4)
