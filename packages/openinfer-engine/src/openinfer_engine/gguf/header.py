"""The head of a GGUF file: metadata and the places of tensors, through a memory map.

    "GGUF" │ u32 version │ u64 tensors │ u64 entries │ key, type, value │ … │ name, sizes, type, offset │ … │ data

Nothing of it is trusted: each count is compared with the bytes that are left before it is followed, so that time and
memory are bounded by the head's size, and tensors must lie one after the other in the data, so that no byte has two
meanings. Written by hand: gguf's own reader follows any count, and takes 4.1 s for the 49,152 tokens of SmolLM2.
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import mmap
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from openinfer_core import InvalidCheckpoint
from openinfer_core.family import check_model_file

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_HEADER_BYTES = 1 << 28
_MAX_ENTRIES = 1 << 16
_MAX_TENSORS = 1 << 16
_MAX_STRINGS = 1 << 22  # of one array
_MAX_NAME_BYTES = 1 << 12
_MAX_DIMENSIONS = 4
_MAX_ALIGNMENT = 1 << 16
_ALIGNMENT = "general.alignment"
_DEFAULT_ALIGNMENT = 32

_BOOL, _STRING, _ARRAY = 7, 8, 9
_NUMBERS: Mapping[int, np.dtype[Any]] = {
    0: np.dtype("u1"),
    1: np.dtype("i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}


@dataclass(frozen=True, slots=True)
class TensorFormat:
    """How numbers are stored: so many of them in a block of so many bytes."""

    name: str
    numbers: int
    num_bytes: int


FORMATS: Mapping[int, TensorFormat] = {
    0: TensorFormat("F32", 1, 4),
    1: TensorFormat("F16", 1, 2),
    2: TensorFormat("Q4_0", 32, 18),
    3: TensorFormat("Q4_1", 32, 20),
    6: TensorFormat("Q5_0", 32, 22),
    7: TensorFormat("Q5_1", 32, 24),
    8: TensorFormat("Q8_0", 32, 34),
    10: TensorFormat("Q2_K", 256, 84),
    11: TensorFormat("Q3_K", 256, 110),
    12: TensorFormat("Q4_K", 256, 144),
    13: TensorFormat("Q5_K", 256, 176),
    14: TensorFormat("Q6_K", 256, 210),
    30: TensorFormat("BF16", 1, 2),
}
"""ggml's number of a type -> the formats that are read. https://github.com/ggml-org/ggml/blob/master/include/ggml.h"""


@dataclass(frozen=True, slots=True)
class StoredAt:
    """A tensor: its shape in NumPy's order, the format of its numbers, and its place in the file."""

    shape: tuple[int, ...]
    format: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    """What a GGUF file says of itself."""

    metadata: Mapping[str, Any]
    """str, int, float, bool, a list of str, or an array of numbers."""
    tensors: Mapping[str, StoredAt]
    """Under ggml's names."""


def map_file(path: Path) -> mmap.mmap:
    """The file, read-only; raises `InvalidCheckpoint` if it cannot be read."""
    try:
        check_model_file(path)
        with path.open("rb") as file:
            if path.stat().st_size < len(_MAGIC):
                raise InvalidCheckpoint(f"{path} is too short to be a GGUF file; was the download interrupted?")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise InvalidCheckpoint(f"{path} cannot be read: {error.strerror}") from error


def read_header(data: mmap.mmap, path: Path) -> Header:
    """Reads and checks a file's head.

    Raises:
        InvalidCheckpoint: it is no GGUF file of version 2 or 3, cut off, or contradicts itself.
    """
    reader = _Reader(data, path)
    if reader.take(len(_MAGIC)) != _MAGIC:
        raise InvalidCheckpoint(f"{path} is no GGUF file: it does not begin with GGUF")
    version = reader.number("<I")
    if version not in _VERSIONS:
        order = "; its bytes are in big-endian order" if version and version & 0xFFFF == 0 else ""
        raise InvalidCheckpoint(f"{path} is GGUF of version {version}, and versions 2 and 3 are read{order}")
    num_tensors = reader.count("tensors", "<Q", least_bytes=24, most=_MAX_TENSORS)
    num_entries = reader.count("metadata entries", "<Q", least_bytes=13, most=_MAX_ENTRIES)
    metadata: dict[str, Any] = {}
    for _ in range(num_entries):
        key = reader.string(most=_MAX_NAME_BYTES)
        if key in metadata:
            raise reader.wrong(f"the key {key!r} occurs twice")
        metadata[key] = reader.value(reader.number("<I"), key)
    described = _described(reader, num_tensors)
    alignment = metadata.get(_ALIGNMENT, _DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 0 < alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
        raise reader.wrong(f"{_ALIGNMENT} is {alignment}, which is no power of two up to {_MAX_ALIGNMENT}")
    return Header(metadata, _placed(reader, described, alignment))


class _Reader:
    """A cursor that never leaves the file."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data = data
        self.path = path
        self.at = 0
        self._end = min(len(data), _MAX_HEADER_BYTES)

    def wrong(self, what: str) -> InvalidCheckpoint:
        return InvalidCheckpoint(f"{self.path} is no valid GGUF file: {what}")

    def take(self, num_bytes: int) -> bytes:
        if num_bytes > self._end - self.at:
            raise self.wrong(
                f"its head goes on at byte {self.at}, but the file, or what is read of it, ends at {self._end}"
            )
        begin, self.at = self.at, self.at + num_bytes
        return self.data[begin : self.at]

    def number(self, code: str) -> int:
        return struct.unpack(code, self.take(struct.calcsize(code)))[0]

    def count(self, what: str, code: str, *, least_bytes: int, most: int) -> int:
        """A number of things that take at least so many bytes each."""
        count = self.number(code)
        if count > most or count * least_bytes > self._end - self.at:
            raise self.wrong(f"it announces {count} {what}, and has room for {(self._end - self.at) // least_bytes}")
        return count

    def string(self, *, most: int = _MAX_HEADER_BYTES) -> str:
        begin = self.at
        encoded = self.take(self.count("bytes of text", "<Q", least_bytes=1, most=most))
        try:
            return encoded.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.wrong(f"the text at byte {begin} is not UTF-8") from error

    def value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _BOOL:
            return self.take(1) != b"\0"
        if kind == _ARRAY:
            return self._array(self.number("<I"), key)
        return self._numbers(kind, 1, key)[0].item()

    def _array(self, kind: int, key: str) -> Sequence[str] | np.ndarray[Any, np.dtype[Any]]:
        if kind == _STRING:
            return [self.string() for _ in range(self.count("texts", "<Q", least_bytes=8, most=_MAX_STRINGS))]
        if kind == _ARRAY:
            raise self.wrong(f"{key!r} is an array of arrays, which are not read")
        count = self.count("numbers", "<Q", least_bytes=1, most=_MAX_HEADER_BYTES)
        return self._numbers(0, count, key) != 0 if kind == _BOOL else self._numbers(kind, count, key)

    def _numbers(self, kind: int, count: int, key: str) -> np.ndarray[Any, np.dtype[Any]]:
        dtype = _NUMBERS.get(kind)
        if dtype is None:
            raise self.wrong(f"{key!r} has a value of type {kind}, which there is not")
        return np.frombuffer(self.take(count * dtype.itemsize), dtype)


@dataclass(frozen=True, slots=True)
class _Described:
    shape: tuple[int, ...]
    format: int
    offset: int


def _described(reader: _Reader, num_tensors: int) -> dict[str, _Described]:
    described: dict[str, _Described] = {}
    for _ in range(num_tensors):
        name = reader.string(most=_MAX_NAME_BYTES)
        if name in described:
            raise reader.wrong(f"the tensor {name!r} occurs twice")
        dimensions = reader.number("<I")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise reader.wrong(f"the tensor {name!r} has {dimensions} dimensions")
        sizes = cast("tuple[int, ...]", struct.unpack(f"<{dimensions}Q", reader.take(8 * dimensions)))
        described[name] = _Described(sizes[::-1], reader.number("<I"), reader.number("<Q"))
    return described


def _placed(reader: _Reader, described: Mapping[str, _Described], alignment: int) -> dict[str, StoredAt]:
    """The places of tensors in the file, which begins their data at the next multiple of the alignment."""
    data_begin = -(-reader.at // alignment) * alignment
    placed: dict[str, StoredAt] = {}
    expected = 0
    for name, tensor in sorted(described.items(), key=lambda item: item[1].offset):
        stored = FORMATS.get(tensor.format)
        if stored is None:
            known = ", ".join(each.name for each in FORMATS.values())
            raise InvalidCheckpoint(
                f"{reader.path} stores {name!r} in ggml's type {tensor.format}, which is not read; read are {known}"
            )
        if 0 in tensor.shape or tensor.shape[-1] % stored.numbers:
            raise reader.wrong(f"{name!r} of shape {list(tensor.shape)} does not divide into blocks of {stored.name}")
        num_bytes = math.prod(tensor.shape) // stored.numbers * stored.num_bytes
        if tensor.offset != expected:
            raise reader.wrong(f"the data of {name!r} begin at {tensor.offset}, where {expected} is the next free byte")
        begin = data_begin + tensor.offset
        if begin + num_bytes > len(reader.data):
            raise reader.wrong(
                f"the data of {name!r} end at byte {begin + num_bytes}, and the file at {len(reader.data)}; was the "
                "download interrupted?"
            )
        placed[name] = StoredAt(tensor.shape, tensor.format, begin, begin + num_bytes)
        expected = -(-(tensor.offset + num_bytes) // alignment) * alignment
    return {name: placed[name] for name in described}
