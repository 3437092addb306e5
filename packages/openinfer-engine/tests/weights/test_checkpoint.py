"""Checkpoints: opening folders, checking them as a whole, and the pieces that ranks read."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from numpy.typing import NDArray

from openinfer_core import InvalidCheckpoint
from openinfer_engine.model import Shard
from openinfer_engine.weights.checkpoint import Checkpoint, RankWeights

Arrays = Mapping[str, NDArray[Any]]


def tensors() -> dict[str, NDArray[Any]]:
    rng = np.random.default_rng(0)
    return {
        "embed.weight": rng.standard_normal((8, 4), np.float32),
        "layer.weight": rng.standard_normal((6, 8), np.float32).astype(ml_dtypes.bfloat16),
        "norm.weight": rng.standard_normal(4, np.float32).astype(np.float16),
    }


def save_shards(folder: Path, shards: Mapping[str, Arrays], weight_map: Mapping[str, str] | None = None) -> None:
    for name, arrays in shards.items():
        safetensors.numpy.save_file(dict(arrays), folder / name)
    found = {tensor: name for name, arrays in shards.items() for tensor in arrays}
    index = {"metadata": {"total_size": 1}, "weight_map": found if weight_map is None else dict(weight_map)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.fixture(params=["one file", "shards"])
def model_dir(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "one file":
        safetensors.numpy.save_file(tensors(), tmp_path / "model.safetensors")
    else:
        whole = tensors()
        first = {"embed.weight": whole.pop("embed.weight")}
        save_shards(tmp_path, {"model-00001-of-00002.safetensors": first, "model-00002-of-00002.safetensors": whole})
    return tmp_path


def shapes() -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in tensors().items()}


def test_folder_reads_as_it_was_written(model_dir: Path) -> None:
    with Checkpoint.open(model_dir) as checkpoint:
        checkpoint.validate(shapes())
        assert checkpoint.num_bytes == 8 * 4 * 4 + 6 * 8 * 2 + 4 * 2
        for name, expected in tensors().items():
            assert np.array_equal(checkpoint.read(name).view(expected.dtype), expected)
        assert checkpoint.read("layer.weight").dtype == np.uint16


def test_arrays_outlive_their_checkpoint_and_it_reads_no_more(model_dir: Path) -> None:
    with Checkpoint.open(model_dir) as checkpoint:
        array = checkpoint.read("embed.weight")
    assert np.array_equal(array, tensors()["embed.weight"])
    with pytest.raises(InvalidCheckpoint, match=r"no tensor 'embed.weight', or is closed"):
        checkpoint.read("embed.weight")


@pytest.mark.parametrize("size", [1, 2])
def test_pieces_of_all_ranks_make_the_whole(model_dir: Path, size: int) -> None:
    with Checkpoint.open(model_dir) as checkpoint:
        ranks = [RankWeights(checkpoint, rank=rank, size=size) for rank in range(size)]
        for name in shapes():
            whole = checkpoint.read(name)
            for shard in (Shard.COLUMN_PARALLEL, Shard.ROW_PARALLEL)[: whole.ndim]:
                pieces = [rank.read(name, shard) for rank in ranks]
                assert np.array_equal(np.concatenate(pieces, shard), whole)


def test_no_piece_is_copied(model_dir: Path) -> None:
    with Checkpoint.open(model_dir) as checkpoint:
        rank = RankWeights(checkpoint, rank=1, size=2)
        whole = checkpoint.read("layer.weight")
        assert np.shares_memory(rank.read("layer.weight"), whole)
        assert np.array_equal(rank.read("layer.weight", Shard.COLUMN_PARALLEL), whole[3:])
        assert np.shares_memory(rank.read("layer.weight", Shard.COLUMN_PARALLEL), whole)
        assert np.array_equal(rank.read("layer.weight", Shard.ROW_PARALLEL), whole[:, 4:])
        assert np.shares_memory(rank.read("layer.weight", Shard.ROW_PARALLEL), whole)


@pytest.mark.parametrize(
    ("name", "shard"), [("layer.weight", Shard.COLUMN_PARALLEL), ("norm.weight", Shard.ROW_PARALLEL)]
)
def test_piece_that_does_not_divide_by_the_ranks_is_refused(model_dir: Path, name: str, shard: Shard) -> None:
    with (
        Checkpoint.open(model_dir) as checkpoint,
        pytest.raises(InvalidCheckpoint, match=f"'{name}' of shape .* for 4"),
    ):
        RankWeights(checkpoint, rank=0, size=4).read(name, shard)


def test_validate_lists_every_kind_of_problem(model_dir: Path) -> None:
    expected = shapes() | {"layer.weight": (6, 9), "head.weight": (8, 4)}
    del expected["embed.weight"]
    with Checkpoint.open(model_dir) as checkpoint, pytest.raises(InvalidCheckpoint) as caught:
        checkpoint.validate(expected, dtypes={"BF16", "F32"})
    message = str(caught.value)
    assert "layer.weight has shape [6, 8], not [6, 9]" in message
    assert "norm.weight has dtype F16, not one of BF16, F32" in message
    assert "head.weight is missing" in message
    assert "embed.weight is not a tensor of this model" in message


def test_validate_ignores_only_the_names_it_is_given(model_dir: Path) -> None:
    expected = shapes()
    del expected["norm.weight"]
    with Checkpoint.open(model_dir) as checkpoint:
        checkpoint.validate(expected, ignorable={"norm.weight", "something.else"})
        with pytest.raises(InvalidCheckpoint, match=r"norm.weight is not a tensor of this model"):
            checkpoint.validate(expected, ignorable={"norm"})


def test_validate_ignores_all_names_that_begin_with_one_that_ends_with_a_dot(model_dir: Path) -> None:
    with Checkpoint.open(model_dir) as checkpoint:
        everything = {name.partition(".")[0] + "." for name in checkpoint.tensors}
        checkpoint.validate({}, ignorable=everything)
        with pytest.raises(InvalidCheckpoint, match=r"norm.weight is not a tensor of this model"):
            checkpoint.validate({}, ignorable=everything - {"norm."} | {"nor", "norm"})


def test_validate_shows_the_first_problems_and_counts_the_rest(model_dir: Path) -> None:
    expected = shapes() | {f"layer.{index}.weight": (1,) for index in range(100)}
    with Checkpoint.open(model_dir) as checkpoint, pytest.raises(InvalidCheckpoint, match="and 95 more") as caught:
        checkpoint.validate(expected)
    assert str(caught.value).count("is missing") == 5


def test_integer_weights_are_refused_by_default(tmp_path: Path) -> None:
    safetensors.numpy.save_file({"a": np.zeros(2, np.int8)}, tmp_path / "model.safetensors")
    with Checkpoint.open(tmp_path) as checkpoint, pytest.raises(InvalidCheckpoint, match="a has dtype I8"):
        checkpoint.validate({"a": (2,)})


def test_folder_without_weights_says_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(
        InvalidCheckpoint, match=r"it has pytorch_model.bin; weights are read from safetensors, and from a GGUF"
    ):
        Checkpoint.open(tmp_path)


def test_folder_with_one_file_and_an_index_is_refused(tmp_path: Path) -> None:
    save_shards(tmp_path, {"model.safetensors": tensors()})
    with pytest.raises(InvalidCheckpoint, match="has both"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "../secret.safetensors",
        "/etc/secret.safetensors",
        "sub/secret.safetensors",
        "..\\secret.safetensors",
        "C:secret.safetensors",
        "secret.bin",
        "..",
        "",
        "a\0.safetensors",
    ],
)
def test_index_that_names_another_place_is_refused_before_it_is_opened(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    safetensors.numpy.save_file({"a": np.zeros(1)}, tmp_path / "secret.safetensors")
    save_shards(folder, {}, {"a": name})
    with pytest.raises(InvalidCheckpoint, match=r"only .safetensors files of the same folder are read"):
        Checkpoint.open(folder)


def test_shard_may_be_a_link_as_in_the_hub_cache(tmp_path: Path) -> None:
    folder = tmp_path / "snapshot"
    folder.mkdir()
    safetensors.numpy.save_file({"a": np.zeros(1)}, tmp_path / "blob")
    (folder / "model.safetensors").symlink_to(tmp_path / "blob")
    with Checkpoint.open(folder) as checkpoint:
        assert checkpoint.tensors.keys() == {"a"}


def test_missing_shard_is_named(tmp_path: Path) -> None:
    save_shards(tmp_path, {"a.safetensors": {"a": np.zeros(1)}}, {"a": "a.safetensors", "b": "b.safetensors"})
    with pytest.raises(InvalidCheckpoint, match=r"lacks 1 of the 2 files of its index: b.safetensors"):
        Checkpoint.open(tmp_path)


def test_index_that_contradicts_its_files_is_refused(tmp_path: Path) -> None:
    save_shards(tmp_path, {"a.safetensors": {"a": np.zeros(1)}}, {"b": "a.safetensors"})
    with pytest.raises(InvalidCheckpoint, match=r"places tensor 'b' in a.safetensors, which does not have it"):
        Checkpoint.open(tmp_path)


def test_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    shards = {
        "a.safetensors": {"a": np.zeros(1), "c": np.zeros(1)},
        "b.safetensors": {"b": np.zeros(1), "c": np.ones(1)},
    }
    save_shards(tmp_path, shards)
    with pytest.raises(InvalidCheckpoint, match=r"tensor 'c' is in a.safetensors and in b.safetensors"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not valid JSON"),
        (b"[]", "is invalid"),
        (b'{"weight_map": {"a": 1}}', "is invalid"),
        (b"{}", "is invalid"),
        (b'{"weight_map": {"a": "a.safetensors", "a": "b.safetensors"}}', "the name 'a' occurs twice"),
    ],
)
def test_damaged_index_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_bytes(content)
    with pytest.raises(InvalidCheckpoint, match=message):
        Checkpoint.open(tmp_path)


def test_a_folder_without_weights_says_what_is_missing_and_what_its_caller_advises(tmp_path: Path) -> None:
    with pytest.raises(InvalidCheckpoint, match=r"has neither model\.safetensors nor model\.safetensors\.index\.json$"):
        Checkpoint.open(tmp_path)
    with pytest.raises(InvalidCheckpoint, match=r"index\.json; do this$"):
        Checkpoint.open(tmp_path, advice="do this")
