"""The safetensors reader against the reference library, and against files that lie."""

import json
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from openinfer_core import InvalidCheckpoint
from openinfer_engine.weights.safetensors_file import MAX_HEADER_BYTES, NUMPY_DTYPES, SafetensorsFile


def write(path: Path, header: object, data: bytes = b"", *, length: int | None = None) -> Path:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded) if length is None else length) + encoded + data)
    return path


def entry(dtype: str = "F32", shape: object = (1,), offsets: object = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_every_dtype_of_the_reference_is_read_as_it_was_written(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    dtypes: dict[str, Any] = {
        "BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "U16": np.uint16, "I16": np.int16, "U32": np.uint32,
        "I32": np.int32, "U64": np.uint64, "I64": np.int64, "F16": np.float16, "F32": np.float32, "F64": np.float64,
        "BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2,
    }  # fmt: skip
    tensors = {name: rng.integers(0, 2, (3, 5, 7)).astype(dtype) for name, dtype in dtypes.items()}
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file(tensors, path, metadata={"format": "np"})

    file = SafetensorsFile(path)

    assert {name: info.dtype for name, info in file.tensors.items()} == {name: name for name in dtypes}
    for name, expected in tensors.items():
        assert file.read(name).shape == (3, 5, 7)
        assert np.array_equal(file.read(name).view(expected.dtype), expected)
    assert NUMPY_DTYPES.keys() - dtypes.keys() == {"F8_E8M0", "F4"}


def test_random_files_read_like_the_reference(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    for trial in range(20):
        tensors = {
            f"layer.{index}": rng.standard_normal(rng.integers(0, 5, rng.integers(0, 4))).astype(
                rng.choice(["f2", "f4", "f8"])
            )
            for index in range(rng.integers(0, 6))
        }
        path = tmp_path / f"{trial}.safetensors"
        safetensors.numpy.save_file(tensors, path)
        file = SafetensorsFile(path)
        reference = safetensors.numpy.load_file(path)
        assert file.tensors.keys() == reference.keys()
        for name, expected in reference.items():
            assert file.read(name).dtype == expected.dtype
            assert np.array_equal(file.read(name), expected)


def test_arrays_are_views_of_the_map_that_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file({"a": np.arange(6, dtype=np.float32)}, path)
    file = SafetensorsFile(path)
    array = file.read("a")
    assert np.shares_memory(array, file.read("a"))
    assert not array.flags.writeable
    del file
    assert array.tolist() == [0, 1, 2, 3, 4, 5]


def test_tensor_that_is_not_aligned_in_the_file_is_read_as_an_aligned_copy(tmp_path: Path) -> None:
    values = np.array([1.5, -2.5], np.float32)
    header = {"byte": entry("U8", (1,), (0, 1)), "floats": entry("F32", (2,), (1, 9))}
    array = SafetensorsFile(write(tmp_path / "a.safetensors", header, b"\7" + values.tobytes())).read("floats")
    assert array.flags.aligned
    assert np.array_equal(array, values)


def test_header_may_end_with_spaces_and_carry_metadata(tmp_path: Path) -> None:
    header = json.dumps({"__metadata__": {"format": "pt"}, "a": entry()}).encode() + b"   "
    assert SafetensorsFile(write(tmp_path / "a.safetensors", header, bytes(4))).tensors.keys() == {"a"}


LIES: dict[str, tuple[object, bytes, int | None, str]] = {
    "length beyond the file": ({"a": entry()}, bytes(4), 5000, "announces a header of 5000 bytes but has"),
    "length beyond the bound": ({"a": entry()}, bytes(4), MAX_HEADER_BYTES + 1, "at most 100000000 are read"),
    "length of all ones": ({"a": entry()}, bytes(4), 2**64 - 1, "at most 100000000 are read"),
    "no object": (b"[]", b"", None, "does not begin with {"),
    "empty header": (b"", b"", None, "does not begin with {"),
    "leading space": (b' {"a": 1}', b"", None, "does not begin with {"),
    "no JSON": (b'{"a": ', b"", None, "is not valid JSON"),
    "no UTF-8": (b'{"\xff": 1}', b"", None, "is not valid JSON"),
    "endless nesting": (b'{"a":' + b"[" * 200_000, b"", None, "is not valid JSON"),
    "two of one name": (
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}',
        b"12",
        None,
        "the name 'a' occurs twice",
    ),
    "metadata no strings": ({"__metadata__": {"a": 1}}, b"", None, "is invalid"),
    "entry no object": ({"a": 3}, b"", None, "tensor 'a'"),
    "entry with more": ({"a": entry() | {"extra": 1}}, bytes(4), None, "extra"),
    "entry without shape": ({"a": {"dtype": "F32", "data_offsets": [0, 4]}}, bytes(4), None, "shape"),
    "unknown dtype": ({"a": entry("F6_E2M3")}, bytes(4), None, "tensor 'a' has dtype 'F6_E2M3'"),
    "negative dimension": ({"a": entry(shape=(-1, -1))}, bytes(4), None, r"impossible shape \[-1, -1\]"),
    "33 dimensions": ({"a": entry(shape=(1,) * 33)}, bytes(4), None, "impossible shape"),
    "fractional dimension": ({"a": entry(shape=(1.5,))}, bytes(4), None, "tensor 'a'"),
    "huge shape": ({"a": entry(shape=(2**62, 2**62))}, bytes(4), None, "not those from 0 to 4"),
    "too few bytes": ({"a": entry(shape=(2,))}, bytes(4), None, "takes 8 bytes, not those from 0 to 4"),
    "begin after end": ({"a": entry(shape=(0,), offsets=(4, 0))}, bytes(4), None, "not those from 4 to 0"),
    "negative begin": ({"a": entry(offsets=(-4, 0))}, bytes(4), None, "not those from -4 to 0"),
    "beyond the end": ({"a": entry(shape=(2,), offsets=(0, 8))}, bytes(4), None, "its tensors cover 8"),
    "data that no tensor owns": ({"a": entry()}, bytes(5), None, "has 5 bytes of data and its tensors cover 4"),
    "hole": ({"a": entry(), "b": entry(offsets=(5, 9))}, bytes(9), None, "leaves a hole after tensor 'a'"),
    "overlap": ({"a": entry(), "b": entry(offsets=(2, 6))}, bytes(6), None, "overlaps tensor 'a'"),
    "same bytes twice": ({"a": entry(), "b": entry()}, bytes(4), None, "overlaps tensor 'a'"),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_file_that_lies_is_refused_with_its_name(tmp_path: Path, lie: str) -> None:
    header, data, length, message = LIES[lie]
    path = write(tmp_path / "weights.safetensors", header, data, length=length)
    with pytest.raises(InvalidCheckpoint, match=message) as caught:
        SafetensorsFile(path)
    assert "weights.safetensors" in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\0" * 7, b"version https://git-lfs.github.com/spec/v1\n"])
def test_file_that_is_something_else_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(InvalidCheckpoint, match="safetensors file"):
        SafetensorsFile(path)


def test_the_name_that_occurs_twice_is_found_in_one_pass(tmp_path: Path) -> None:
    # to look each name up among those before it would take more than a minute
    names = ",".join(f'"{number}":0' for number in [*range(60_000), 59_999])
    with pytest.raises(InvalidCheckpoint, match="the name '59999' occurs twice"):
        SafetensorsFile(write(tmp_path / "model.safetensors", f"{{{names}}}".encode()))


def test_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidCheckpoint, match="cannot be read: No such file"):
        SafetensorsFile(tmp_path / "model.safetensors")


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damaged_files_are_accepted_only_if_the_reference_accepts_them(tmp_path: Path, data: st.DataObject) -> None:
    tensors = {"a": np.arange(3, dtype=np.float32), "b": np.arange(4, dtype=np.float16), "c": np.zeros(0, np.int8)}
    damaged = bytearray(safetensors.numpy.save(tensors))
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    damaged = damaged[: len(damaged) - data.draw(st.sampled_from([0, 0, 0, 1, 7]))]
    path = tmp_path / "model.safetensors"
    path.write_bytes(damaged)
    try:
        file = SafetensorsFile(path)
    except InvalidCheckpoint:
        return
    reference = dict(safetensors.deserialize(bytes(damaged)))
    assert file.tensors.keys() == reference.keys()
    for name, info in file.tensors.items():
        assert list(info.shape) == reference[name]["shape"]
        assert file.read(name).tobytes() == bytes(reference[name]["data"])
