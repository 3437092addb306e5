"""Checkpoints with a file per rank, whose pieces become whole tensors."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from numpy.typing import NDArray

from openinfer_core import InvalidCheckpoint
from openinfer_engine.model import Shard
from openinfer_engine.weights.checkpoint import Checkpoint, RankWeights

RANKS = 4
WHOLE = {
    "rows": np.arange(8 * 3, dtype=np.float32).reshape(8, 3),
    "columns": np.arange(5 * 12, dtype=np.float32).reshape(5, 12),
    "repeated": np.arange(6, dtype=np.float32),
    **{f"experts.{rank}": np.full((2, 2), rank, np.float32) for rank in range(RANKS)},
}
SHAPES = {name: array.shape for name, array in WHOLE.items()}


def of_rank(rank: int) -> dict[str, NDArray[Any]]:
    return {
        "rows": np.split(WHOLE["rows"], RANKS)[rank],
        "columns": np.ascontiguousarray(np.split(WHOLE["columns"], RANKS, axis=1)[rank]),
        "repeated": WHOLE["repeated"],
        f"experts.{rank}": WHOLE[f"experts.{rank}"],
    }


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    for rank in range(RANKS):
        safetensors.numpy.save_file(of_rank(rank), tmp_path / f"model{rank}-mp{RANKS}.safetensors")
    return tmp_path


def test_pieces_become_whole_tensors_for_any_number_of_ranks(model_dir: Path) -> None:
    with Checkpoint.open(model_dir) as checkpoint:
        checkpoint.validate(SHAPES)
        for name, expected in WHOLE.items():
            np.testing.assert_array_equal(checkpoint.read(name), expected)
            assert checkpoint.tensors[name].shape == expected.shape
        assert checkpoint.num_bytes == sum(array.nbytes for array in WHOLE.values())
        half = RankWeights(checkpoint, rank=1, size=2).read("rows", Shard.COLUMN_PARALLEL)
        np.testing.assert_array_equal(half, WHOLE["rows"][4:])


def test_pieces_whose_whole_is_not_known_or_another_are_refused(model_dir: Path) -> None:
    with Checkpoint.open(model_dir) as checkpoint:
        with pytest.raises(InvalidCheckpoint, match="'rows' is in 4 pieces, whose whole is not known"):
            checkpoint.read("rows")
        with pytest.raises(InvalidCheckpoint, match=r"rows has shape \[2, 3\], not \[9, 3\]"):
            checkpoint.validate(SHAPES | {"rows": (9, 3)})


def test_set_of_files_that_is_not_whole_is_refused(model_dir: Path) -> None:
    (model_dir / "model2-mp4.safetensors").rename(model_dir / "elsewhere")
    with pytest.raises(InvalidCheckpoint, match=r"lacks model2-mp4.safetensors of its files for 4 ranks"):
        Checkpoint.open(model_dir)
    safetensors.numpy.save_file({}, model_dir / "model0-mp2.safetensors")
    with pytest.raises(InvalidCheckpoint, match="has files for 2, 4 ranks; keep one set"):
        Checkpoint.open(model_dir)


def test_files_of_ranks_beside_a_whole_one_are_refused(model_dir: Path) -> None:
    safetensors.numpy.save_file({}, model_dir / "model.safetensors")
    with pytest.raises(InvalidCheckpoint, match=r"both model.safetensors and model0-mp4.safetensors; remove"):
        Checkpoint.open(model_dir)
