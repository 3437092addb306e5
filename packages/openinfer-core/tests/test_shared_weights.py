"""Weights in shared memory: what is written is a safetensors file, and nothing is left behind."""

import json
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from openinfer_core.control import ControlCommand, Pause, Sleep, UpdateWeights
from openinfer_core.errors import InvalidRequest
from openinfer_core.shared_weights import SharedTensor, SharedWeights, content_hash

linux = pytest.mark.skipif(sys.platform != "linux", reason="shared memory has names in /dev/shm on Linux")
ARRAYS = {f"layer.{i}": np.arange(6 * i, dtype=np.float32).reshape(2, 3 * i) for i in range(5)}


def shared_tensors() -> dict[str, SharedTensor]:
    return {name: SharedTensor("F32", array.shape, array.data) for name, array in ARRAYS.items()}


def load(data: bytes) -> dict[str, np.ndarray]:
    """By the definition of the safetensors format."""
    begin = 8 + int.from_bytes(data[:8], "little")
    assert begin % 8 == 0
    found, end = {}, 0
    for name, entry in json.loads(data[8:begin]).items():
        assert (entry["dtype"], entry["data_offsets"][0]) == ("F32", end)
        end = entry["data_offsets"][1]
        found[name] = np.frombuffer(data[begin:][slice(*entry["data_offsets"])], np.float32).reshape(entry["shape"])
    assert begin + end == len(data)
    return found


@linux
@pytest.mark.parametrize(("segment_bytes", "count"), [(1 << 20, 1), (100, 3), (1, 5)])
def test_segments_are_safetensors_files_that_hold_all_tensors(segment_bytes: int, count: int) -> None:
    with SharedWeights(shared_tensors(), segment_bytes=segment_bytes) as shared:
        assert len(shared.names) == count
        paths = [Path("/dev/shm", name) for name in shared.names]
        found = {name: array for path in paths for name, array in load(path.read_bytes()).items()}
        assert all(not path.stat().st_mode & 0o077 for path in paths)
    assert found.keys() == ARRAYS.keys()
    assert all(np.array_equal(found[name], array) for name, array in ARRAYS.items())
    assert not any(path.exists() for path in paths)
    shared.close()


def test_content_hash_binds_every_byte_and_no_order() -> None:
    whole = content_hash(shared_tensors())
    assert content_hash(dict(reversed(shared_tensors().items()))) == whole
    others = {whole}
    for name in ("layer.1", "layer.4"):
        changed = ARRAYS[name].copy()
        changed.reshape(-1).view(np.uint8)[-1] ^= 1
        others.add(content_hash(shared_tensors() | {name: SharedTensor("F32", changed.shape, changed.data)}))
    reshaped = ARRAYS["layer.2"].reshape(-1)
    others.add(content_hash(shared_tensors() | {"layer.2": SharedTensor("F32", reshaped.shape, reshaped.data)}))
    others.add(content_hash(shared_tensors() | {"layer.2": SharedTensor("I32", (2, 6), ARRAYS["layer.2"].data)}))
    assert len(others) == 5


@pytest.mark.parametrize(
    ("dtype", "shape", "data", "field"),
    [
        ("F31", (1,), b"1234", "dtype"),
        ("F32", (2,), b"1234", "data"),
        ("F32", (-1, -1), b"1234", "data"),
        ("F4", (3,), b"1", "data"),
        ("U8", (2,), memoryview(b"1234")[::2], "data"),
    ],
)
def test_tensor_that_is_none_is_refused(dtype, shape, data, field) -> None:
    with pytest.raises(InvalidRequest) as refused:
        SharedTensor(dtype, shape, data)
    assert refused.value.field == field


def test_no_tensors_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="0 segments"):
        SharedWeights({})


def decode(*fields: object) -> object:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=ControlCommand)


@pytest.mark.parametrize(
    "fields",
    [
        ("update_weights",),
        ("update_weights", "folder", ["segment"]),
        ("update_weights", None, ["same", "same"]),
        ("update_weights", None, ["../etc/passwd"]),
        ("update_weights", None, ["a/b"]),
        ("update_weights", None, [".hidden"]),
        ("update_weights", None, ["x"] * 1025),
        ("update_weights", "folder", [], "ABCD" * 16),
        ("update_weights", "folder", [], "ab"),
        ("update_weights", "folder", [], "ab" * 16 + "\n"),
        ("update_weights", None, ["segment\n"]),
        ("update_weights", "folder", [], None, "wait"),
        ("update_weights", ""),
        ("pause", "later"),
    ],
)
def test_command_that_means_nothing_is_not_decoded(fields) -> None:
    with pytest.raises(msgspec.ValidationError):
        decode(*fields)


def test_commands_are_decoded_with_their_defaults() -> None:
    assert decode("pause") == Pause()
    assert decode("sleep", False) == Sleep(keeps_weights=False)
    assert decode("update_weights", None, ["a-1"]) == UpdateWeights(segments=("a-1",))
