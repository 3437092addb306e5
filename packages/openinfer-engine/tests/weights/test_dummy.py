"""Dummy weights: the same for everyone, and of a useful size."""

import numpy as np
import pytest
from numpy.typing import NDArray

from openinfer_core import InvalidCheckpoint
from openinfer_engine.model import Shard
from openinfer_engine.weights.dummy import DeviceDummyWeights, DummyWeights
from openinfer_kernels.cpu import CpuOps

SHAPES = {
    "q.weight": (64, 96),
    "k.weight": (64, 96),
    "input_norm.weight": (96,),
    "q.bias": (96,),
    "big.weight": (3000, 512),
}


def weights(*, rank: int = 0, size: int = 1, seed: int = 0) -> DummyWeights:
    return DummyWeights(SHAPES, rank=rank, size=size, seed=seed)


Source = DummyWeights | DeviceDummyWeights


@pytest.mark.parametrize("name", SHAPES)
def test_tensor_has_its_shape_and_depends_on_name_and_seed_only(name: str) -> None:
    tensor = weights().read(name)
    assert tensor.shape == SHAPES[name]
    assert tensor.dtype == np.uint16
    assert np.array_equal(tensor, weights().read(name))
    assert not np.array_equal(tensor, weights(seed=1).read(name))


def test_tensors_of_one_shape_differ() -> None:
    assert not np.array_equal(weights().read("q.weight"), weights().read("k.weight"))


@pytest.mark.parametrize("shard", [Shard.COLUMN_PARALLEL, Shard.ROW_PARALLEL])
@pytest.mark.parametrize("size", [2, 4])
def test_pieces_of_all_ranks_make_the_whole(shard: Shard, size: int) -> None:
    pieces = [weights(rank=rank, size=size).read("q.weight", shard) for rank in range(size)]
    assert np.array_equal(np.concatenate(pieces, shard), weights().read("q.weight"))


@pytest.mark.parametrize("kind", [DummyWeights, DeviceDummyWeights])
def test_values_are_finite_and_of_the_spread_that_keeps_logits_apart(kind: type[Source]) -> None:
    def values(name: str) -> NDArray[np.float32]:
        return CpuOps().upload_weight(kind(SHAPES, rank=0, size=1).read(name))

    matrix, norm, bias = values("big.weight"), values("input_norm.weight"), values("q.bias")
    hidden = np.random.default_rng(0).standard_normal((50, 512), np.float32)
    assert np.isfinite(matrix).all()
    assert 1.8 < (hidden @ matrix.T).std() < 2.2
    assert 0.9 < norm.mean() < 1.1
    assert 0.05 < norm.std() < 0.15
    assert abs(bias).max() < 0.2


def test_no_two_rows_are_equal_although_the_sequence_repeats() -> None:
    matrix = weights().read("big.weight")
    assert matrix.size > 2**20
    assert len(np.unique(matrix, axis=0)) == len(matrix)


@pytest.mark.parametrize("num_rows", [1, 1000, 1048, 1049, 2500])
def test_a_tensor_is_a_piece_of_the_sequence_whatever_its_size(num_rows: int) -> None:
    period, width = 1_048_573, 1000
    names = [f"{index}.weight" for index in range(8)]  # with 1,000 rows all of them go past the end of a period
    longer, shorter = (
        DummyWeights(dict.fromkeys(names, (rows, width)), rank=0, size=1) for rows in (num_rows + 1, num_rows)
    )
    for name in names:
        found = longer.read(name)
        assert np.array_equal(shorter.read(name), found[:num_rows])
        assert np.array_equal(found.ravel()[period:], found.ravel()[: max(0, found.size - period)])


def test_unknown_name_is_refused() -> None:
    with pytest.raises(InvalidCheckpoint, match=r"no tensor 'v.weight'"):
        weights().read("v.weight")


@pytest.mark.parametrize("shard", [Shard.COLUMN_PARALLEL, Shard.ROW_PARALLEL])
def test_device_pieces_of_all_ranks_make_the_whole_and_depend_on_name_and_seed(shard: Shard) -> None:
    def tensor(
        name: str, *, shard: Shard = Shard.WHOLE, rank: int = 0, size: int = 1, seed: int = 0
    ) -> NDArray[np.float32]:
        return CpuOps().upload_weight(DeviceDummyWeights(SHAPES, rank=rank, size=size, seed=seed).read(name, shard))

    whole = tensor("q.weight")
    assert np.array_equal(
        np.concatenate([tensor("q.weight", shard=shard, rank=rank, size=4) for rank in range(4)], shard), whole
    )
    assert not np.array_equal(whole, tensor("k.weight"))
    assert not np.array_equal(whole, tensor("q.weight", seed=1))
    with pytest.raises(InvalidCheckpoint, match=r"cannot be sharded as COLUMN_PARALLEL for 5 ranks"):
        tensor("q.weight", shard=Shard.COLUMN_PARALLEL, size=5)
