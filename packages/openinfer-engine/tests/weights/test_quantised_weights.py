"""Quantised matrices: from a file of every dtype that has them to a rank's piece, and dummies of them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from openinfer_core import InvalidCheckpoint
from openinfer_engine.model import Shard
from openinfer_engine.weights.checkpoint import Checkpoint, RankWeights
from openinfer_engine.weights.dummy import DeviceDummyWeights, DummyWeights
from openinfer_engine.weights.quantised import StoredMatrix, read_quantised
from openinfer_engine.weights.safetensors_file import SafetensorsFile
from openinfer_engine.weights.stored_format import StoredFormat
from openinfer_engine.weights.stored_tensor import RandomIds, StoredTensor
from openinfer_kernels.cpu import CpuOps
from openinfer_kernels.testing.paged import make_batch
from openinfer_kernels.weights.quantised import FP8_BLOCK_128, INT4_GROUP_32, MXFP4

FP8, INT4, FP4 = FP8_BLOCK_128, INT4_GROUP_32, MXFP4
SHAPE = (96, 128)
Tensors = Mapping[str, tuple[str, tuple[int, ...], NDArray[Any]]]
"""Name -> dtype and shape of the header, and the data."""


class Rank:
    """A communicator's place in its group."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size


def write(path: Path, tensors: Tensors) -> None:
    """A safetensors file, by its definition."""
    header, data = {}, b""
    for name, (dtype, shape, array) in tensors.items():
        end = len(data) + array.nbytes
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), end]}
        data += array.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def tensors() -> dict[str, tuple[str, tuple[int, ...], NDArray[Any]]]:
    rng = np.random.default_rng(4)
    fp8 = rng.normal(0, 20, SHAPE).astype(ml_dtypes.float8_e4m3fn)
    words = rng.integers(-(2**31), 2**31, (96, 16)).astype(np.int32)
    pairs = rng.integers(-128, 128, (96, 64)).astype(np.int8)
    powers = rng.integers(120, 126, (96, 4)).astype(np.uint8)
    return {
        "fp8.weight": ("F8_E4M3", SHAPE, fp8),
        "fp8.scale": ("F32", (1, 1), np.array([[0.25]], np.float32)),
        "power.weight": ("F8_E4M3", SHAPE, fp8),
        "power.scale": ("F8_E8M0", (1, 1), np.array([[125]], np.uint8)),
        "int4.packed": ("I32", (96, 16), words),
        "int4.scale": ("BF16", (96, 4), rng.normal(size=(96, 4)).astype(ml_dtypes.bfloat16)),
        "int4.shape": ("I64", (2,), np.array(SHAPE, np.int64)),
        "fp4.weight": ("I8", (96, 64), pairs),
        "fp4.scale": ("F8_E8M0", (96, 4), powers),
        "paired.weight": ("F4", SHAPE, pairs),
        "paired.scale": ("F8_E8M0", (96, 4), powers),
        "table": ("I64", (10, 3), rng.integers(0, 7, (10, 3))),
    }


MATRICES = {
    "fp8": StoredMatrix(name="fp8", shape=SHAPE, format=StoredFormat(format=FP8, scales="scale")),
    "power": StoredMatrix(name="power", shape=SHAPE, format=StoredFormat(format=FP8, scales="scale")),
    "int4": StoredMatrix(
        name="int4",
        shape=SHAPE,
        format=StoredFormat(format=INT4, codes="packed", scales="scale", declared_shape="shape"),
    ),
    "fp4": StoredMatrix(name="fp4", shape=SHAPE, format=StoredFormat(format=FP4, scales="scale")),
    "paired": StoredMatrix(name="paired", shape=SHAPE, format=StoredFormat(format=FP4, scales="scale")),
}
TABLE = StoredTensor(shape=(10, 3), dtypes=("I64", "I32"), dummy=RandomIds(bound=7))
EXPECTED = {name: spec for each in MATRICES.values() for name, spec in each.tensors().items()} | {"table": TABLE}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    write(tmp_path / "model.safetensors", tensors())
    return Checkpoint.open(tmp_path)


def values(weights: Any, name: str, shard: Shard = Shard.WHOLE, *, rank: int = 0, size: int = 1) -> NDArray[Any]:
    """What a rank's piece stands for: products with unit vectors."""
    part = read_quantised(weights, MATRICES[name], MATRICES[name].format, shard, Rank(rank, size))
    weight = CpuOps().upload_quantised(part)
    return CpuOps().linear(np.eye(weight.shape[1], dtype=np.float32), weight, make_batch(1)).T


def test_checkpoint_of_every_format_is_valid_and_read_as_its_bits(checkpoint: Checkpoint) -> None:
    checkpoint.validate(EXPECTED)
    for name, (_, _, array) in tensors().items():
        read = RankWeights(checkpoint, rank=0, size=1).read_stored(name)
        assert read.tobytes() == array.tobytes()
        assert read.shape == EXPECTED[name].shape
    np.testing.assert_array_equal(checkpoint.read("table"), tensors()["table"][2])


def test_values_are_those_of_the_codes(checkpoint: Checkpoint) -> None:
    weights, data = RankWeights(checkpoint, rank=0, size=1), {name: array for name, (_, _, array) in tensors().items()}
    fp8 = data["fp8.weight"].astype(np.float32)
    np.testing.assert_array_equal(values(weights, "fp8"), fp8 * np.float32(0.25))
    np.testing.assert_array_equal(values(weights, "power"), fp8 * np.float32(0.25))
    np.testing.assert_array_equal(values(weights, "fp4"), values(weights, "paired"))
    first = data["int4.packed"][5, 2] >> 12 & 15
    assert values(weights, "int4")[5, 19] == (first - 8) * data["int4.scale"][5, 0].astype(np.float32)


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("shard", [Shard.COLUMN_PARALLEL, Shard.ROW_PARALLEL])
@pytest.mark.parametrize("size", [2, 4])
def test_pieces_of_all_ranks_make_the_whole(checkpoint: Checkpoint, name: str, shard: Shard, size: int) -> None:
    """Also where 128 rows or columns share a scale, of which a rank has 24 to 64."""
    pieces = [
        values(RankWeights(checkpoint, rank=rank, size=size), name, shard, rank=rank, size=size) for rank in range(size)
    ]
    whole = values(RankWeights(checkpoint, rank=0, size=1), name)
    np.testing.assert_array_equal(np.concatenate(pieces, shard), whole)


@pytest.mark.parametrize("name", MATRICES)
def test_dummies_spread_as_other_matrices_do_and_are_cut_like_them(name: str) -> None:
    for kind in (DummyWeights, DeviceDummyWeights):
        whole = values(kind(EXPECTED, rank=0, size=1), name)
        assert np.isfinite(whole).all()
        hidden = np.random.default_rng(0).standard_normal((50, SHAPE[1]), np.float32)
        assert 1.3 < (hidden @ whole.T).std() < 2.9  # powers of two are up to a factor of 1.41 off
        pieces = [
            values(kind(EXPECTED, rank=rank, size=2), name, Shard.COLUMN_PARALLEL, rank=rank, size=2) for rank in (0, 1)
        ]
        np.testing.assert_array_equal(np.concatenate(pieces), whole)


def test_dummy_tables_have_ids_below_their_bound_and_none_twice_in_a_row() -> None:
    for kind in (DummyWeights, DeviceDummyWeights):
        table = kind(EXPECTED, rank=0, size=1).read_stored("table")
        assert table.dtype == np.int64
        assert ((table >= 0) & (table < 7)).all()
        assert all(len(set(row)) == 3 for row in table.tolist())


def test_weights_and_stored_tensors_are_not_read_for_each_other() -> None:
    source = DummyWeights({**EXPECTED, "norm.weight": (8,)}, rank=0, size=1)
    with pytest.raises(InvalidCheckpoint, match="'table' that is a weight"):
        source.read("table")
    with pytest.raises(InvalidCheckpoint, match=r"'norm\.weight' of codes or ids"):
        source.read_stored("norm.weight")


def test_other_dtypes_and_shapes_are_named(tmp_path: Path) -> None:
    changed = tensors()
    changed["table"] = ("F32", (10, 3), np.zeros((10, 3), np.float32))
    changed["paired.weight"] = ("F4", (96, 64), np.zeros((96, 32), np.uint8))
    changed["int4.shape"] = ("I64", (2,), np.array([96, 64]))
    write(tmp_path / "model.safetensors", changed)
    with Checkpoint.open(tmp_path) as checkpoint:
        with pytest.raises(InvalidCheckpoint, match=r"paired.weight has shape \[96, 64\].*table has dtype F32"):
            checkpoint.validate(EXPECTED)
        with pytest.raises(InvalidCheckpoint, match=r"int4.shape says \[96, 64\], and int4.packed is read as"):
            values(RankWeights(checkpoint, rank=0, size=1), "int4")


def test_odd_number_of_paired_codes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write(path, {"odd": ("F4", (2, 3), np.zeros(3, np.uint8))})
    with pytest.raises(InvalidCheckpoint, match=r"'odd' of shape \[2, 3\] has no pairs of F4"):
        SafetensorsFile(path)
