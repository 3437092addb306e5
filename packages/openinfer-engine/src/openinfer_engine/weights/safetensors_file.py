"""Reading one safetensors file through a memory map; `copied_file.py` reads one that may change meanwhile.

    u64 little endian: N │ N bytes of JSON: name → dtype, shape, [begin, end) │ data

The header is not trusted: every size, offset and shape is checked before an array is made of it. As in the
reference implementation the tensors must cover the data without holes, so that no byte has two meanings.
https://github.com/huggingface/safetensors#format
"""

import math
import mmap
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import msgspec
import numpy as np

from openinfer_core import InvalidCheckpoint
from openinfer_core.family import check_model_file
from openinfer_engine.weights.unique_json import decode_unique_json
from openinfer_kernels import HostArray

MAX_HEADER_BYTES = 100_000_000  # the reference implementation's bound

_LENGTH_BYTES = 8
_METADATA = "__metadata__"
_PAIRED = "F4"  # two values in a byte
_MAX_DIMENSIONS = 32

# what each dtype of the format is read as; those that NumPy lacks are read as their bits, and F4 as pairs of them
NUMPY_DTYPES: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {
        "BOOL": np.dtype("?"),
        "U8": np.dtype("u1"),
        "I8": np.dtype("i1"),
        "F8_E4M3": np.dtype("u1"),
        "F8_E5M2": np.dtype("u1"),
        "F8_E8M0": np.dtype("u1"),
        "F4": np.dtype("u1"),
        "U16": np.dtype("<u2"),
        "I16": np.dtype("<i2"),
        "F16": np.dtype("<f2"),
        "BF16": np.dtype("<u2"),
        "U32": np.dtype("<u4"),
        "I32": np.dtype("<i4"),
        "F32": np.dtype("<f4"),
        "U64": np.dtype("<u8"),
        "I64": np.dtype("<i8"),
        "F64": np.dtype("<f8"),
    }
)


class TensorInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a header says about one tensor."""

    dtype: str  # a key of `NUMPY_DTYPES`
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]  # first byte and the byte after the last, counted from the end of the header

    @property
    def num_bytes(self) -> int:
        return self.data_offsets[1] - self.data_offsets[0]

    @property
    def array_shape(self) -> tuple[int, ...]:
        """The shape of the array that it is read as: half as long in the last axis where two values are in a byte."""
        return (*self.shape[:-1], self.shape[-1] // 2) if self.dtype == _PAIRED else self.shape


class SafetensorsFile:
    """One open file: its tensors by name, as read-only arrays over the memory map.

    The file must not be changed while it is open.

    Raises:
        InvalidCheckpoint: it cannot be read, or is not a valid safetensors file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map = _map_file(path)
        # tensors: name -> dtype, shape and place of every tensor
        self._data_start, self.tensors = read_header(
            lambda begin, end: bytes(self._map[begin:end]), num_bytes=len(self._map), path=path
        )

    def read(self, name: str) -> HostArray:
        """A whole tensor, read-only, without a copy (with one, if its data are not aligned to its dtype).

        Raises:
            KeyError: the file has no such tensor.
        """
        info = self.tensors[name]
        array = np.frombuffer(
            self._map,
            NUMPY_DTYPES[info.dtype],
            count=math.prod(info.array_shape),
            offset=self._data_start + info.data_offsets[0],
        )
        return np.require(array, requirements="A").reshape(info.array_shape)


def read_header(
    read: Callable[[int, int], bytes], *, num_bytes: int, path: Path, max_header_bytes: int = MAX_HEADER_BYTES
) -> tuple[int, Mapping[str, TensorInfo]]:
    """Where the data of a safetensors file begin, and the dtype, shape and place of every tensor by name.

    Args:
        read: the bytes from one place of the file to another.
        num_bytes: of the file.
        path: for messages.
        max_header_bytes: that are read of it.

    Raises:
        InvalidCheckpoint: it is not a valid safetensors file.
    """
    if num_bytes < _LENGTH_BYTES:
        raise InvalidCheckpoint(f"{path} is too short to be a safetensors file; was the download interrupted?")
    data_start = _LENGTH_BYTES + _header_bytes(read(0, _LENGTH_BYTES), num_bytes, path, max_header_bytes)
    tensors = _tensors(read(_LENGTH_BYTES, data_start), path)
    _check_cover(tensors, data_bytes=num_bytes - data_start, path=path)
    return data_start, MappingProxyType(tensors)


def _map_file(path: Path) -> mmap.mmap:
    try:
        check_model_file(path)
        with path.open("rb") as file:
            if path.stat().st_size < _LENGTH_BYTES:
                raise InvalidCheckpoint(f"{path} is too short to be a safetensors file; was the download interrupted?")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise InvalidCheckpoint(f"{path} cannot be read: {error.strerror}") from error


def _header_bytes(length: bytes, num_bytes: int, path: Path, max_header_bytes: int) -> int:
    header_bytes = int.from_bytes(length, "little")
    if header_bytes > max_header_bytes:
        raise InvalidCheckpoint(
            f"{path} announces a header of {header_bytes} bytes; at most {max_header_bytes} are read. "
            "It is no safetensors file, or a Git LFS pointer in place of one"
        )
    if _LENGTH_BYTES + header_bytes > num_bytes:
        raise InvalidCheckpoint(
            f"{path} announces a header of {header_bytes} bytes but has {num_bytes} bytes in all; "
            "was the download interrupted?"
        )
    return header_bytes


def _tensors(header: bytes, path: Path) -> dict[str, TensorInfo]:
    if not header.startswith(b"{"):
        raise InvalidCheckpoint(f"the header of {path} does not begin with {{: it is no safetensors file")
    decoded = cast("dict[str, object]", decode_unique_json(header, what=f"the header of {path}"))
    metadata = decoded.pop(_METADATA, {})
    try:
        msgspec.convert(metadata, dict[str, str])
        return _infos(decoded)
    except (msgspec.ValidationError, ValueError) as error:
        raise InvalidCheckpoint(f"the header of {path} is invalid: {error}") from error


def _infos(decoded: dict[str, object]) -> dict[str, TensorInfo]:
    try:
        found = msgspec.convert(decoded, dict[str, TensorInfo])
    except msgspec.ValidationError:  # which entry's, is found one by one
        return {name: _tensor(name, entry) for name, entry in decoded.items()}
    return {name: checked_tensor(name, info) for name, info in found.items()}


def _tensor(name: str, entry: object) -> TensorInfo:
    try:
        info = msgspec.convert(entry, TensorInfo)
    except msgspec.ValidationError as error:
        raise ValueError(f"tensor {name!r}: {error}") from error
    return checked_tensor(name, info)


def checked_tensor(name: str, info: TensorInfo) -> TensorInfo:
    """What a header says, if it can be; `ValueError` if not."""
    if info.dtype not in NUMPY_DTYPES:
        raise ValueError(f"tensor {name!r} has dtype {info.dtype!r}; read are {', '.join(NUMPY_DTYPES)}")
    if len(info.shape) > _MAX_DIMENSIONS or any(size < 0 for size in info.shape):
        raise ValueError(f"tensor {name!r} has the impossible shape {list(info.shape)}")
    if info.dtype == _PAIRED and (not info.shape or info.shape[-1] % 2):
        raise ValueError(f"tensor {name!r} of shape {list(info.shape)} has no pairs of {_PAIRED} in its last axis")
    begin, end = info.data_offsets
    num_bytes = math.prod(info.array_shape) * NUMPY_DTYPES[info.dtype].itemsize
    if begin < 0 or end - begin != num_bytes:
        raise ValueError(
            f"tensor {name!r} of dtype {info.dtype} and shape {list(info.shape)} takes {num_bytes} bytes, "
            f"not those from {begin} to {end}"
        )
    return info


def _check_cover(tensors: Mapping[str, TensorInfo], *, data_bytes: int, path: Path) -> None:
    """Raises unless the tensors cover the data exactly: no overlap, no hole, nothing beyond the end."""
    expected, previous = 0, "the header"
    for begin, end, name in sorted((*info.data_offsets, name) for name, info in tensors.items()):
        if begin != expected:
            what = "overlaps" if begin < expected else "leaves a hole after"
            raise InvalidCheckpoint(
                f"{path}: tensor {name!r} begins at byte {begin} of the data and {what} {previous}, "
                f"which ends at {expected}"
            )
        expected, previous = end, f"tensor {name!r}"
    if expected != data_bytes:
        raise InvalidCheckpoint(
            f"{path} has {data_bytes} bytes of data and its tensors cover {expected}; was the download interrupted?"
        )
