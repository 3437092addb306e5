"""Reading the factors of an adapter: threads read its bytes to where they stay, and look at them while they are hashed.

The file is read, not mapped, and what was looked at and hashed is what is given: a file that is changed meanwhile
cannot harm.

A thread waits for the interpreter after each call, next to steps that launch kernels and other threads that read: with
a MiB at a time these waits were half of the time. So a thread reads some MiB in one call and looks at them in two, and
the hash of all is one call, with as many threads of its own, which do not know the interpreter.
"""

import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
from blake3 import blake3

from openinfer_core import InvalidCheckpoint
from openinfer_core.process.processors import usable_processors
from openinfer_engine.weights.safetensors_file import NUMPY_DTYPES, TensorInfo
from openinfer_kernels import HostArray

READ_DTYPES = ("F32", "BF16", "F16")
_MOST_THREADS = 8
_SHARES_OF_THREAD = 2
"""What a thread takes at a time is a half of its part: threads are not equally fast."""
_LEAST_SHARE_BYTES = 1 << 20
_SHARE_MULTIPLE = 4096
"""Of a share's bytes: a number lies in one share."""
_PASSING_BYTES = 16 << 20
"""Of tensors that are given to be written elsewhere: what is read before they are, or one tensor."""
_INFINITE_BITS: Mapping[str, int] = {"<u2": 0x7F80, "<f2": 0x7C00, "<f4": 0x7F800000}
"""Of positive infinity, which those of NaN follow; BF16 is read as its bits."""


NamedTensor: TypeAlias = tuple[str, TensorInfo]
T = TypeVar("T")


def _nothing() -> None: ...


def adapter_threads() -> int:
    """That work on one adapter at a time."""
    return min(_MOST_THREADS, usable_processors())


class ReadingThreads:
    """Read adapters; kept from one to the next, as to start eight takes a millisecond. They end with this object."""

    def __init__(self, count: int | None = None) -> None:
        """`count`: `adapter_threads` unless it is given."""
        self.count = count or adapter_threads()
        self._pool = ThreadPoolExecutor(self.count, thread_name_prefix="openinfer-adapter-read")

    def run(self, calls: Iterable[Callable[[], T]], *, meanwhile: Callable[[], object] = _nothing) -> list[T]:
        """What the calls return; raises what one raises when all have ended. The calling thread does `meanwhile`."""
        begun = [self._pool.submit(call) for call in calls]
        try:
            meanwhile()
        finally:
            wait(begun)
        return [each.result() for each in begun]


TakeTensor: TypeAlias = Callable[[str, HostArray], None]
"""A tensor by its name, as it is stored; BF16 as its bits in uint16. In memory that is used again after the call."""


class NotFiniteError(Exception):
    """A tensor has numbers that are not finite; its name."""


class _Range(NamedTuple):
    """Bytes that follow each other in the order of the tensors and in the file."""

    begin: int
    """In that order."""
    place: int
    """In the file's data."""


@dataclass(frozen=True, slots=True)
class TensorOrder:
    """Tensors in an order of their own, and where their bytes are in a file."""

    tensors: Sequence[NamedTensor]
    ends: Sequence[int]
    """Of each, in bytes of this order."""
    ranges: Sequence[_Range]
    dtype: str | None
    """Of all; None if they differ."""

    @classmethod
    def of(cls, tensors: Sequence[NamedTensor]) -> "TensorOrder":
        ends = list(accumulate(info.num_bytes for _, info in tensors))
        ranges: list[_Range] = []
        begin, expected = 0, -1
        for (_, info), end in zip(tensors, ends, strict=True):
            if info.data_offsets[0] != expected:
                ranges.append(_Range(begin, info.data_offsets[0]))
            begin, expected = end, info.data_offsets[1]
        dtypes = {info.dtype for _, info in tensors}
        return cls(tensors, ends, ranges, dtypes.pop() if len(dtypes) == 1 else None)

    @property
    def num_bytes(self) -> int:
        return self.ends[-1] if self.ends else 0

    def places(self, begin: int, end: int) -> Iterable[tuple[int, int, int]]:
        """Begin, end and place in the file's data of each range in these bytes."""
        index = bisect_right(self.ranges, begin, key=lambda each: each.begin) - 1
        while begin < end:
            of = self.ranges[index]
            index += 1
            stop = min(end, self.ranges[index].begin) if index < len(self.ranges) else end
            yield begin, stop, of.place + begin - of.begin
            begin = stop


class TensorFile(NamedTuple):
    """A file of tensors, open."""

    descriptor: int
    path: Path
    """For messages."""
    data_start: int


def read_exactly(descriptor: int, begin: int, end: int, path: Path) -> bytes:
    """Bytes of a file; `InvalidCheckpoint` if it ends before."""
    memory = bytearray(end - begin)
    _read_into(descriptor, memoryview(memory), begin, path)
    return bytes(memory)


def read_tensors(
    file: TensorFile,
    order: TensorOrder,
    *,
    threads: ReadingThreads,
    into: HostArray | None = None,
    take: TakeTensor | None = None,
    meanwhile: Callable[[], None] = _nothing,
) -> bytes:
    """Reads all tensors of a file, which cover its data.

    Args:
        file: that they are in.
        order: all of its tensors.
        threads: that read.
        into: memory of as many bytes, which has them in this order afterwards.
        take: is given each, called from several threads.
        meanwhile: what the calling thread does while others read.

    Returns:
        BLAKE3 of all numbers in this order of the tensors, whatever the file's is.

    Raises:
        InvalidCheckpoint: the file became shorter.
        NotFiniteError: of the first such tensor in this order.
    """
    hasher = blake3(max_threads=threads.count)
    parts = [order] if into is not None else list(_parts(order))
    memory: Any = np.empty(max(part.num_bytes for part in parts), np.uint8) if into is None else into
    for part in parts:
        data = memory[: part.num_bytes]
        shares = list(_shares(part.num_bytes, threads.count))
        threads.run(
            (partial(_read_share, file, part, data, share) for share in shares),
            meanwhile=meanwhile if part is parts[0] else _nothing,
        )
        are_finite = threads.run(
            (partial(_share_is_finite, part, data, share) for share in shares), meanwhile=partial(hasher.update, data)
        )
        if not all(are_finite):
            _require_finite(data, part.tensors)
        if take is not None:
            arrays = list(zip(part.tensors, _arrays(data, part.tensors), strict=True))
            threads.run(partial(_give, take, arrays[index :: threads.count]) for index in range(threads.count))
    return hasher.digest()


def _parts(order: TensorOrder) -> Iterable[TensorOrder]:
    begin = start = 0
    for index, end in enumerate(order.ends, start=1):
        if end - start >= _PASSING_BYTES or index == len(order.ends):
            yield TensorOrder.of(order.tensors[begin:index])
            begin, start = index, end


def _shares(num_bytes: int, num_threads: int) -> Iterable[slice]:
    size = max(_LEAST_SHARE_BYTES, -(-num_bytes // (num_threads * _SHARES_OF_THREAD)))
    size = -(-size // _SHARE_MULTIPLE) * _SHARE_MULTIPLE
    return (slice(begin, min(begin + size, num_bytes)) for begin in range(0, num_bytes, size))


def _read_share(file: TensorFile, order: TensorOrder, data: Any, share: slice) -> None:
    memory = memoryview(data)
    for begin, end, place in order.places(share.start, share.stop):
        _read_into(file.descriptor, memory[begin:end], file.data_start + place, file.path)


def _share_is_finite(order: TensorOrder, data: HostArray, share: slice) -> bool:
    """False also where dtypes differ: then each tensor is looked at."""
    return order.dtype is not None and _is_finite(data[share], NUMPY_DTYPES[order.dtype])


def _read_into(descriptor: int, memory: memoryview, place: int, path: Path) -> None:
    done = 0
    while done < len(memory):
        count = os.preadv(descriptor, [memory[done:]], place + done)
        if count == 0:
            raise InvalidCheckpoint(f"{path} became shorter while it was read")
        done += count


def _require_finite(memory: HostArray, tensors: Sequence[NamedTensor]) -> None:
    for (name, _), array in zip(tensors, _arrays(memory, tensors), strict=True):
        if not _is_finite(array, array.dtype):
            raise NotFiniteError(name)


def _is_finite(data: HostArray, dtype: "np.dtype[Any]") -> bool:
    infinite, size = _INFINITE_BITS[dtype.str], dtype.itemsize
    sign = 1 << 8 * size - 1
    # As integers: the largest with a sign is positive, the largest without is negative. No array is made for this.
    return bool(data.view(f"i{size}").max() < infinite and data.view(f"u{size}").max() < infinite + sign)


def _give(take: TakeTensor, arrays: Sequence[tuple[NamedTensor, HostArray]]) -> None:
    for (name, _), array in arrays:
        take(name, array)


def _arrays(memory: HostArray, tensors: Sequence[NamedTensor]) -> Iterable[HostArray]:
    """Views, also where they are not aligned to their dtype."""
    begin = 0
    for _, info in tensors:
        end = begin + info.num_bytes
        yield memory[begin:end].view(NUMPY_DTYPES[info.dtype]).reshape(info.shape)
        begin = end
