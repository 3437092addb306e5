"""Loading: names, codes and files of published checkpoints, and which tensors are read."""

import json
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from numpy.typing import NDArray

from openinfer_core import InvalidCheckpoint, read_config
from openinfer_deepseek_v4.family import DeepseekV4Definition
from openinfer_deepseek_v4.weights import mtp_tensors
from openinfer_engine.distributed.local_group import LocalGroup
from openinfer_engine.model import Shard
from openinfer_engine.weights.checkpoint import Checkpoint
from openinfer_engine.weights.dummy import DummyWeights
from openinfer_engine.weights.stored_config import check_stored
from openinfer_engine.weights.stored_tensor import StoredTensor, spec_bytes
from openinfer_kernels.cpu import CpuOps

Stored: TypeAlias = tuple[str, tuple[int, ...], bytes]
"""dtype of the safetensors format, shape, data."""

_LINEARS = ("wq_a", "wq_b", "wkv", "wo_a", "wo_b")
_ROWS = ("embed.weight", "head.weight", "wq_b.weight", "wq_b.scale", "wo_a.weight", "weights_proj.weight", "attn_sink")
_COLUMNS = ("wo_b.weight", "wo_b.scale")
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

definition = DeepseekV4Definition()
TOKENS = list(range(3, 60))


@pytest.fixture(scope="module")
def weights() -> dict[str, NDArray[Any]]:
    return published_weights(Path(__file__).parent / "fixtures" / "all_kinds")


def folder(tmp_path: Path, fixtures: Path, name: str) -> Path:
    made = tmp_path / name
    made.mkdir()
    shutil.copy(fixtures / "all_kinds" / "config.json", made)
    return made


def test_published_names_mean_the_same_as_those_of_transformers(
    fixtures: Path, tmp_path: Path, weights: dict[str, NDArray[Any]], harness: Any
) -> None:
    published = folder(tmp_path, fixtures, "published")
    write(published / "model.safetensors", {name: plain(array) for name, array in weights.items()})
    expected = harness(fixtures / "all_kinds").step({"a": TOKENS})["a"]
    np.testing.assert_array_equal(harness(published).step({"a": TOKENS})["a"], expected)


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_codes_and_scales_mean_what_a_packer_of_the_test_wrote(
    fixtures: Path, tmp_path: Path, weights: dict[str, NDArray[Any]], harness: Any, ranks: int
) -> None:
    """In one file, and in files of eight ranks, on any number of ranks; against the values that the codes stand for."""
    stored, meant = quantised(weights)
    plain_folder, coded, pieces = (folder(tmp_path, fixtures, name) for name in ("plain", "coded", "pieces"))
    write(plain_folder / "model.safetensors", {name: plain(array) for name, array in meant.items()})
    write(coded / "model.safetensors", stored)
    for rank, tensors in enumerate(rank_files(weights, 8)[0]):
        write(pieces / f"model{rank}-mp8.safetensors", tensors)
    expected = harness(plain_folder).step({"a": TOKENS})["a"]
    assert expected.std() > 0.5
    for each in (coded, pieces):
        model = harness(each, ranks=ranks)
        assert model.config.storage.linears is not None
        assert np.abs(model.step({"a": TOKENS})["a"] - expected).max() < 1e-3


def test_published_tensors_count_as_published(published: dict[str, Any]) -> None:
    """69,187 tensors and 159,609,485,896 bytes with the block that drafts tokens, in the dtypes that they have."""
    config = definition.parse(published)
    model, mtp = definition.tensors(config), mtp_tensors(config)
    assert (len(model) + len(mtp), len(mtp)) == (69_187, 1_575)

    def stored_bytes(tensors: Any) -> int:
        in_float32 = (".ape", "attn_sink", "gate.bias", "_fn", "_base", "_scale")
        return sum(
            spec_bytes(spec, itemsize_bytes=4 if name.endswith(in_float32) else 2)
            if not isinstance(spec, StoredTensor) or "I64" in spec.dtypes
            else int(np.prod(spec.shape))
            for name, spec in tensors.items()
        )

    assert stored_bytes(mtp) == 3_593_787_756
    assert stored_bytes(model) + stored_bytes(mtp) == 159_609_485_896


class RecordingWeights:
    """A `WeightSource` that notes what is read."""

    def __init__(self, shapes: Any) -> None:
        self._dummy = DummyWeights(shapes, rank=0, size=1)
        self.names: set[str] = set()

    def read(self, name: str, shard: Shard = Shard.WHOLE) -> NDArray[Any]:
        assert name not in self.names, f"{name} is read twice"
        self.names.add(name)
        return self._dummy.read(name, shard)

    def read_stored(self, name: str, shard: Shard = Shard.WHOLE) -> Any:
        assert name not in self.names, f"{name} is read twice"
        self.names.add(name)
        return self._dummy.read_stored(name, shard)


@pytest.mark.parametrize("quantised", [False, True])
def test_load_reads_every_tensor_once_and_no_other(fixtures: Path, *, quantised: bool) -> None:
    given = read_config(fixtures / "all_kinds")
    config = definition.parse(given | ({"quantization_config": {"quant_method": "fp8"}} if quantised else {}))
    recording = RecordingWeights(definition.tensors(config))
    (communicator,) = LocalGroup(1).communicators
    definition.load(config, recording, ops=CpuOps(), communicator=communicator, max_model_tokens=8)
    assert recording.names == definition.tensors(config).keys()


def test_unknown_tensor_and_missing_tensor_are_refused(
    fixtures: Path, tmp_path: Path, weights: dict[str, NDArray[Any]]
) -> None:
    wrong = folder(tmp_path, fixtures, "wrong")
    arrays = {name: plain(array) for name, array in weights.items()}
    arrays["layers.0.attn.compressor.ape"] = arrays.pop("layers.2.attn.compressor.ape")
    arrays["mtp.0.norm.weight"] = plain(np.ones(3, np.float32))
    write(wrong / "model.safetensors", arrays)
    config = definition.parse(read_config(wrong))
    with Checkpoint.open(wrong) as checkpoint, pytest.raises(InvalidCheckpoint) as refused:
        check_stored(definition, config, checkpoint)
    assert "layers.2.attn.compressor.ape is missing" in str(refused.value)
    assert "layers.0.attn.compressor.ape is not a tensor of this model" in str(refused.value)
    assert "mtp" not in str(refused.value)


# --- packers of these tests: codes, scales, files per rank ---------------------------------------------------


def published_weights(model_dir: Path) -> dict[str, NDArray[Any]]:
    """The tensors under their published names, dequantised; tables as they are."""
    found: dict[str, NDArray[Any]] = {}
    with Checkpoint.open(model_dir) as checkpoint:
        for name, info in checkpoint.tensors.items():
            array = checkpoint.read(name)
            plain = name.removeprefix("model.").replace("embed_tokens", "embed").replace("hc_head.hc_", "hc_head_")
            plain = plain.replace(".attn.norm.", ".attn.kv_norm.")
            found[plain] = np.array(array) if info.dtype == "I64" else CpuOps().upload_weight(array)
    return found


def write(path: Path, tensors: Mapping[str, Stored]) -> None:
    """One safetensors file."""
    header: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + len(data)]}
        end += len(data)
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + b"".join(data for _, _, data in tensors.values()))


def plain(array: NDArray[Any]) -> Stored:
    """As it is."""
    return {"float32": "F32", "int64": "I64"}[array.dtype.name], array.shape, array.tobytes()


def quantised(weights: Mapping[str, NDArray[Any]]) -> tuple[dict[str, Stored], dict[str, NDArray[Any]]]:
    """What the published checkpoint stores in few bits so, and what these bits mean; scales are powers of two."""
    stored: dict[str, Stored] = {}
    meant: dict[str, NDArray[Any]] = {}
    for name, array in weights.items():
        parts, stem = name.split("."), name.removesuffix(".weight")
        is_linear = parts[-2:-1] in ([each] for each in _LINEARS) and "compressor" not in parts
        if "experts" in parts:
            stored[name], stored[f"{stem}.scale"], meant[name] = _fp4(array)
        elif is_linear or "shared_experts" in parts:
            stored[name], stored[f"{stem}.scale"], meant[name] = _fp8(array)
        else:
            stored[name], meant[name] = plain(array), array
    return stored, meant


def rank_files(
    weights: Mapping[str, NDArray[Any]], size: int
) -> tuple[list[dict[str, Stored]], dict[str, NDArray[Any]]]:
    """The files of `size` ranks: `wo_a` is dequantised, FP4 has its own dtype, experts are their rank's alone."""
    stored, meant = quantised(weights)
    files: list[dict[str, Stored]] = [{} for _ in range(size)]
    for name, tensor in stored.items():
        if name.endswith("wo_a.scale"):
            continue
        expert = name.split(".experts.")[1].split(".")[0] if ".experts." in name else None
        owner = None if expert is None else int(expert) * size // _num_experts(weights)
        for rank, file in enumerate(files):
            if owner in (None, rank):
                file[name] = _piece(name, _of_ranks(name, tensor, meant), rank, size)
    return files, meant


def _of_ranks(name: str, tensor: Stored, meant: Mapping[str, NDArray[Any]]) -> Stored:
    dtype, shape, data = tensor
    if name.endswith("wo_a.weight"):
        return plain(meant[name])
    return ("F4", (shape[0], shape[1] * 2), data) if dtype == "I8" else (dtype, shape, data)


def _num_experts(weights: Mapping[str, NDArray[Any]]) -> int:
    return 1 + max(int(name.split(".experts.")[1].split(".")[0]) for name in weights if ".experts." in name)


def _piece(name: str, tensor: Stored, rank: int, size: int) -> Stored:
    dtype, shape, data = tensor
    axis = 0 if name.endswith(_ROWS) else 1 if name.endswith(_COLUMNS) else None
    if axis is None or shape[axis] % size:  # a tiny model's scales are fewer than its ranks
        return dtype, shape, data
    array = np.frombuffer(data, np.uint8).reshape(*shape, -1)
    piece = np.split(array, size, axis=axis)[rank]
    return dtype, piece.shape[:-1], piece.tobytes()


def _fp8(array: NDArray[Any]) -> tuple[Stored, Stored, NDArray[np.float32]]:
    """E4M3 by search among all values, one power of two per 128 x 128."""
    values = np.array([_e4m3(code) for code in range(256)])
    values[[0x7F, 0xFF]] = np.inf
    order = np.argsort(values, kind="stable")
    rows, columns = array.shape
    codes, meant = np.zeros(array.shape, np.uint8), np.zeros(array.shape, np.float32)
    scales = np.zeros((-(-rows // 128), -(-columns // 128)), np.uint8)
    for i, j in np.ndindex(*scales.shape):
        block = np.s_[128 * i : 128 * i + 128, 128 * j : 128 * j + 128]
        exponent = int(np.ceil(np.log2(np.abs(array[block]).max() / 448)))
        scales[i, j] = exponent + 127
        wanted = array[block].astype(np.float64) / 2.0**exponent
        nearest = np.abs(wanted[..., None] - values[order][None, None, :254]).argmin(axis=-1)
        codes[block] = order[nearest]
        meant[block] = values[codes[block]] * 2.0**exponent
    return ("F8_E4M3", array.shape, codes.tobytes()), ("F8_E8M0", scales.shape, scales.tobytes()), meant


def _e4m3(code: int) -> float:
    sign, exponent, fraction = -1.0 if code >> 7 else 1.0, code >> 3 & 15, code & 7
    return sign * (fraction / 8 * 2.0**-6 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7))


def _fp4(array: NDArray[Any]) -> tuple[Stored, Stored, NDArray[np.float32]]:
    """E2M1, two codes per byte, one power of two per 32 inputs."""
    rows, columns = array.shape
    codes, meant = np.zeros(array.shape, np.uint8), np.zeros(array.shape, np.float32)
    scales = np.zeros((rows, columns // 32), np.uint8)
    table = np.array([*_E2M1, *(-value for value in _E2M1)])
    for row, group in np.ndindex(*scales.shape):
        part = np.s_[row, 32 * group : 32 * group + 32]
        exponent = int(np.ceil(np.log2(np.abs(array[part]).max() / 6)))
        scales[row, group] = exponent + 127
        codes[part] = np.abs(array[part][:, None] / 2.0**exponent - table).argmin(axis=1)
        meant[part] = table[codes[part]] * 2.0**exponent
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8)
    return ("I8", packed.shape, packed.tobytes()), ("F8_E8M0", scales.shape, scales.tobytes()), meant
