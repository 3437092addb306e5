"""Reading the factors of an adapter in one pass: threads read a part of the file, look at its numbers, and hash it.

What a part has is in the processor's cache by then: hashing takes most of the time, and each byte comes from memory
once. The file is read, not mapped, and what was looked at and hashed is what is used: a file that is changed meanwhile
cannot harm.
"""

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from openinfer_core import InvalidCheckpoint
from openinfer_engine.weights.safetensors_file import NUMPY_DTYPES, TensorInfo
from openinfer_kernels import HostArray

READ_DTYPES = ("F32", "BF16", "F16")
DIGEST_BYTES = 16
PIECE_BYTES = 4 << 20
"""Of a tensor, hashed as one: part of what a digest is, as adapters are known by it."""
_LEAST_TASK_BYTES = 256 << 10
_TASKS_OF_THREAD = 4
_MOST_THREADS = 16
_PREFIX = b"openinfer-lora\0"
_INFINITE_BITS: Mapping[str, int] = {"<u2": 0x7F80, "<f2": 0x7C00, "<f4": 0x7F800000}
"""Of positive infinity, which those of NaN follow; BF16 is read as its bits."""


def adapter_threads() -> int:
    """That work on one adapter at a time."""
    return min(_MOST_THREADS, os.cpu_count() or 1)


def hashed(data: bytes | memoryview) -> bytes:
    """SHA-256, for which processors have instructions: 1.5 times as fast as BLAKE2b there."""
    found = hashlib.sha256(_PREFIX)
    found.update(data)
    return found.digest()[:DIGEST_BYTES]


class ReadTensors(NamedTuple):
    """Tensors of a file, by name."""

    arrays: Mapping[str, HostArray]
    """As they are stored; BF16 as its bits in uint16."""
    digests: Mapping[str, bytes]
    """Of all pieces of each, one after the other."""


class NotFiniteError(Exception):
    """A tensor has numbers that are not finite; its name."""


class _Piece(NamedTuple):
    name: str
    dtype: "np.dtype[Any]"
    begin: int
    end: int


def read_exactly(descriptor: int, begin: int, end: int, path: Path) -> bytes:
    """Bytes of a file; `InvalidCheckpoint` if it ends before."""
    memory = bytearray(end - begin)
    _read_into(descriptor, memoryview(memory), begin, path)
    return bytes(memory)


def read_tensors(descriptor: int, path: Path, tensors: Mapping[str, TensorInfo], *, data_start: int) -> ReadTensors:
    """Reads all tensors of a file, which cover its data.

    Raises:
        InvalidCheckpoint: the file became shorter.
        NotFiniteError: of the first such tensor in the file's order.
    """
    ordered = sorted(tensors.items(), key=lambda each: each[1].data_offsets)
    num_bytes = ordered[-1][1].data_offsets[1] if ordered else 0
    memory: Any = np.empty(num_bytes, np.uint8)  # a buffer, which typing knows from 3.12 on
    data = memoryview(memory)

    def take(pieces: Sequence[_Piece]) -> list[bytes]:
        begin, end = pieces[0].begin, pieces[-1].end
        _read_into(descriptor, data[begin:end], data_start + begin, path)
        _require_finite(memory, pieces)
        return [hashed(data[each.begin : each.end]) for each in pieces]

    digests: dict[str, list[bytes]] = {name: [] for name in tensors}
    with ThreadPoolExecutor(adapter_threads(), thread_name_prefix="openinfer-adapter-read") as pool:
        tasks = [(pieces, pool.submit(take, pieces)) for pieces in _tasks(_pieces(ordered), num_bytes)]
        arrays = {name: _array(data, info) for name, info in ordered}  # meanwhile
        for pieces, found in tasks:
            for piece, digest in zip(pieces, found.result(), strict=True):
                digests[piece.name].append(digest)
    return ReadTensors(arrays, {name: b"".join(found) for name, found in digests.items()})


def _pieces(ordered: Iterable[tuple[str, TensorInfo]]) -> Iterable[_Piece]:
    for name, info in ordered:
        begin, end = info.data_offsets
        for place in range(begin, end, PIECE_BYTES):
            yield _Piece(name, NUMPY_DTYPES[info.dtype], place, min(place + PIECE_BYTES, end))


def _tasks(pieces: Iterable[_Piece], num_bytes: int) -> Iterable[Sequence[_Piece]]:
    """A few for each thread: an adapter of a small rank has hundreds of tensors that are hashed in no time."""
    least = max(_LEAST_TASK_BYTES, num_bytes // (_TASKS_OF_THREAD * adapter_threads()))
    task: list[_Piece] = []
    for piece in pieces:
        task.append(piece)
        if piece.end - task[0].begin >= least:
            yield task
            task = []
    if task:
        yield task


def _read_into(descriptor: int, memory: memoryview, place: int, path: Path) -> None:
    done = 0
    while done < len(memory):
        count = os.preadv(descriptor, [memory[done:]], place + done)
        if count == 0:
            raise InvalidCheckpoint(f"{path} became shorter while it was read")
        done += count


def _require_finite(memory: HostArray, pieces: Sequence[_Piece]) -> None:
    dtype = pieces[0].dtype
    if all(each.dtype == dtype for each in pieces) and _is_finite(memory[pieces[0].begin : pieces[-1].end], dtype):
        return
    for piece in pieces:
        if not _is_finite(memory[piece.begin : piece.end], piece.dtype):
            raise NotFiniteError(piece.name)


def _is_finite(data: HostArray, dtype: "np.dtype[Any]") -> bool:
    infinite, size = _INFINITE_BITS[dtype.str], dtype.itemsize
    sign = 1 << 8 * size - 1
    # As integers: the largest with a sign is positive, the largest without is negative. No array is made for this.
    return bool(data.view(f"i{size}").max() < infinite and data.view(f"u{size}").max() < infinite + sign)


def _array(data: memoryview, info: TensorInfo) -> HostArray:
    """Of what is read while this is made: a view, also where it is not aligned to its dtype."""
    begin, end = info.data_offsets
    return np.frombuffer(data.toreadonly()[begin:end], NUMPY_DTYPES[info.dtype]).reshape(info.shape)
