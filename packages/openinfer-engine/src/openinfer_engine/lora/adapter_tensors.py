"""Reading the factors of an adapter in one pass: threads read some tensors, look at their numbers, hash and give them.

What a thread has read is in the processor's cache by then, in memory that it uses again for the next tensors, or where
the tensors stay: hashing takes most of the time, and each byte comes from the file once. The file is read, not mapped,
and what was looked at and hashed is what is given: a file that is changed meanwhile cannot harm.

The tensors of a task are hashed together, and those of a thread's share read and looked at in one call each where they
follow each other in the file, as in PEFT's: a thread waits for the interpreter after each call, and these waits were
half of the time of eight threads.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from openinfer_core import InvalidCheckpoint
from openinfer_core.process.processors import usable_processors
from openinfer_engine.weights.safetensors_file import NUMPY_DTYPES, TensorInfo
from openinfer_kernels import HostArray

READ_DTYPES = ("F32", "BF16", "F16")
DIGEST_BYTES = 16
PIECE_BYTES = 4 << 20
"""Of a task, hashed as one: part of what a digest is, as adapters are known by it."""
LEAST_TASK_BYTES = 1 << 20
"""Of a task, unless it is the last: part of what a digest is."""
_MOST_THREADS = 8
"""With twelve on an H200's host a load took as long, and a sixth more of processors: each waits for the interpreter."""
_SHARES_OF_THREAD = 3
"""What a thread takes at a time is a third of its part: threads are not equally fast."""
_PREFIX = b"openinfer-lora\0"
_INFINITE_BITS: Mapping[str, int] = {"<u2": 0x7F80, "<f2": 0x7C00, "<f4": 0x7F800000}
"""Of positive infinity, which those of NaN follow; BF16 is read as its bits."""


def adapter_threads() -> int:
    """That work on one adapter at a time."""
    return min(_MOST_THREADS, usable_processors())


def hashed(data: bytes | memoryview) -> bytes:
    """SHA-256, for which processors have instructions: 1.5 times as fast as BLAKE2b there."""
    found = hashlib.sha256(_PREFIX)
    found.update(data)
    return found.digest()[:DIGEST_BYTES]


TakeTensor: TypeAlias = Callable[[str, HostArray], None]
"""A tensor by its name, as it is stored; BF16 as its bits in uint16. In memory that is used again after the call."""


class NotFiniteError(Exception):
    """A tensor has numbers that are not finite; its name."""


class _Task(NamedTuple):
    """Tensors that are hashed together, as they follow each other."""

    tensors: Sequence[tuple[str, TensorInfo]]
    num_bytes: int


def read_exactly(descriptor: int, begin: int, end: int, path: Path) -> bytes:
    """Bytes of a file; `InvalidCheckpoint` if it ends before."""
    memory = bytearray(end - begin)
    _read_into(descriptor, memoryview(memory), begin, path)
    return bytes(memory)


def read_tensors(
    descriptor: int,
    path: Path,
    tensors: Mapping[str, TensorInfo],
    *,
    order: Sequence[str],
    data_start: int,
    into: HostArray | None = None,
    take: TakeTensor | None = None,
    num_threads: int | None = None,
    meanwhile: Callable[[], None] = lambda: None,
) -> bytes:
    """Reads all tensors of a file, which cover its data.

    Args:
        descriptor: of the file.
        path: for messages.
        tensors: of its header.
        order: of all of them.
        data_start: where they begin.
        into: memory of as many bytes, which has them in this order afterwards.
        take: is given each, called from several threads.
        num_threads: `adapter_threads` unless it is given.
        meanwhile: what the calling thread does while others read.

    Returns:
        Digests of all numbers in this order of the tensors, whatever the file's is.

    Raises:
        InvalidCheckpoint: the file became shorter.
        NotFiniteError: of the first such tensor in this order.
    """
    num_threads = num_threads or adapter_threads()
    shares = _shares(list(_tasks((name, tensors[name]) for name in order)), num_threads * _SHARES_OF_THREAD)
    sizes = [sum(task.num_bytes for task in share) for share in shares]
    most = max(sizes, default=0)
    spare: list[HostArray] = []

    def run(share: Sequence[_Task], size: int, share_end: int) -> bytes:
        if into is None:
            memory: Any = spare.pop() if spare else np.empty(most, np.uint8)
        else:
            memory = into[share_end - size : share_end]
        data = memoryview(memory)[:size]  # a buffer, which typing knows from 3.12 on
        of_share = [each for task in share for each in task.tensors]
        for begin, end, place in _ranges(of_share):
            _read_into(descriptor, data[begin:end], data_start + place, path)
        _require_finite(memory[:size], of_share)
        ends = accumulate(task.num_bytes for task in share)
        found = b"".join(
            _hashed_pieces(data[end - task.num_bytes : end]) for task, end in zip(share, ends, strict=True)
        )
        if take is not None:
            for (name, _), array in zip(of_share, _arrays(memory, of_share), strict=True):
                take(name, array)
        if into is None:
            spare.append(memory)
        return found

    with ThreadPoolExecutor(num_threads, thread_name_prefix="openinfer-adapter-read") as pool:
        found = pool.map(run, shares, sizes, accumulate(sizes))  # begins them all
        meanwhile()
        return b"".join(found)


def _shares(tasks: Sequence[_Task], most: int) -> Sequence[Sequence[_Task]]:
    """So many at most, of tasks that follow each other."""
    count = min(most, len(tasks))
    return [tasks[len(tasks) * i // count : len(tasks) * (i + 1) // count] for i in range(count)]


def _tasks(ordered: Iterable[tuple[str, TensorInfo]]) -> Iterable[_Task]:
    """Alike for any number of threads, as the digest is."""
    task: list[tuple[str, TensorInfo]] = []
    num_bytes = 0
    for each in ordered:
        task.append(each)
        num_bytes += _size(each[1])
        if num_bytes >= LEAST_TASK_BYTES:
            yield _Task(task, num_bytes)
            task, num_bytes = [], 0
    if task:
        yield _Task(task, num_bytes)


def _size(info: TensorInfo) -> int:
    return info.data_offsets[1] - info.data_offsets[0]


def _ranges(tensors: Sequence[tuple[str, TensorInfo]]) -> Iterable[tuple[int, int, int]]:
    """Begin and end in a share's memory, and the place in the file's data, of tensors that follow each other there."""
    begin = end = 0
    place = tensors[0][1].data_offsets[0]
    for _, info in tensors:
        if info.data_offsets[0] != place + end - begin:
            yield begin, end, place
            begin, place = end, info.data_offsets[0]
        end += _size(info)
    yield begin, end, place


def _hashed_pieces(data: memoryview) -> bytes:
    if len(data) <= PIECE_BYTES:
        return hashed(data) if data else b""
    return b"".join(hashed(data[place : place + PIECE_BYTES]) for place in range(0, len(data), PIECE_BYTES))


def _read_into(descriptor: int, memory: memoryview, place: int, path: Path) -> None:
    done = 0
    while done < len(memory):
        count = os.preadv(descriptor, [memory[done:]], place + done)
        if count == 0:
            raise InvalidCheckpoint(f"{path} became shorter while it was read")
        done += count


def _require_finite(memory: HostArray, tensors: Sequence[tuple[str, TensorInfo]]) -> None:
    dtype = tensors[0][1].dtype
    if all(info.dtype == dtype for _, info in tensors) and _is_finite(memory, NUMPY_DTYPES[dtype]):
        return
    for (name, _), array in zip(tensors, _arrays(memory, tensors), strict=True):
        if not _is_finite(array, array.dtype):
            raise NotFiniteError(name)


def _is_finite(data: HostArray, dtype: "np.dtype[Any]") -> bool:
    infinite, size = _INFINITE_BITS[dtype.str], dtype.itemsize
    sign = 1 << 8 * size - 1
    # As integers: the largest with a sign is positive, the largest without is negative. No array is made for this.
    return bool(data.view(f"i{size}").max() < infinite and data.view(f"u{size}").max() < infinite + sign)


def _arrays(memory: HostArray, tensors: Sequence[tuple[str, TensorInfo]]) -> Iterable[HostArray]:
    """Views, also where they are not aligned to their dtype."""
    begin = 0
    for _, info in tensors:
        end = begin + _size(info)
        yield memory[begin:end].view(NUMPY_DTYPES[info.dtype]).reshape(info.shape)
        begin = end
