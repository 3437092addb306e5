"""Weights in shared memory, for `UpdateWeights.segments`: a trainer writes and an engine of the same machine reads.

    with SharedWeights(tensors) as shared:
        await handle.control(UpdateWeights(segments=shared.names, content_hash=content_hash(tensors)))

A segment is POSIX shared memory, as Linux shows it in `/dev/shm`, with exactly the bytes of a safetensors file, so
nothing has to be trusted but a header that is checked like any other. It belongs to the user that both processes run
as, and no other may write to it. The engine copies while it reads, and maps nothing: it has no hold on a segment once
the command is answered.
"""

import hashlib
import math
import os
import secrets
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Self

import msgspec

from openinfer_core.control import MAX_SEGMENTS
from openinfer_core.errors import InvalidRequest, Refused

SEGMENT_BYTES = 1 << 32
"""What a segment has at most, but for a single tensor that is larger."""

ITEM_BITS: Mapping[str, int] = MappingProxyType(
    {
        "BOOL": 8,
        "U8": 8,
        "I8": 8,
        "F8_E4M3": 8,
        "F8_E5M2": 8,
        "F8_E8M0": 8,
        "F4": 4,
        "U16": 16,
        "I16": 16,
        "F16": 16,
        "BF16": 16,
        "U32": 32,
        "I32": 32,
        "F32": 32,
        "U64": 64,
        "I64": 64,
        "F64": 64,
    }
)
"""Dtypes of the safetensors format."""

_FOLDER = Path("/dev/shm")  # noqa: S108 - where Linux shows shared memory by name
_ALIGN_BYTES = 8
_LENGTH_BYTES = 8


class SharedTensor:
    """One tensor to be shared: its bytes in the order of C, little endian.

    Args:
        dtype: as the safetensors format calls it: `BF16`, `F32`, …
        shape: of the whole tensor.
        data: as many bytes as these take; `array.data` of a NumPy array, for BF16 one of its bits in uint16.

    Raises:
        InvalidRequest: the dtype is not known, the data are not C-contiguous, or are of another size.
    """

    __slots__ = ("data", "dtype", "shape")

    def __init__(self, dtype: str, shape: tuple[int, ...], data: bytes | bytearray | memoryview) -> None:
        if dtype not in ITEM_BITS:
            raise InvalidRequest(f"dtype {dtype!r} is not one of {', '.join(ITEM_BITS)}", field="dtype")
        view = memoryview(data)
        if not view.c_contiguous:
            raise InvalidRequest("the data of a tensor must be C-contiguous", field="data")
        num_bits = math.prod(shape) * ITEM_BITS[dtype]
        if min(shape, default=0) < 0 or num_bits != 8 * view.nbytes:
            raise InvalidRequest(
                f"a tensor of dtype {dtype} and shape {list(shape)} takes {num_bits // 8} bytes, not {view.nbytes}",
                field="data",
            )
        self.dtype = dtype
        self.shape = shape
        self.data = view.cast("B") if view.nbytes else memoryview(b"")


class SharedWeights:
    """Segments that hold all of some tensors; a context manager, whose end removes them.

    A process that is killed within leaves them, under names that begin with `openinfer-weights-`.

    Raises:
        Refused: this is not Linux.
        InvalidRequest: there are no tensors, or they take more segments than a command may name.
        OSError: there is not so much shared memory; none is left behind.
    """

    def __init__(self, tensors: Mapping[str, SharedTensor], *, segment_bytes: int = SEGMENT_BYTES) -> None:
        parts = list(_parts(tensors, segment_bytes))
        if not 1 <= len(parts) <= MAX_SEGMENTS:
            raise InvalidRequest(
                f"the tensors take {len(parts)} segments; possible are 1 .. {MAX_SEGMENTS}", field="segments"
            )
        if sys.platform != "linux":
            raise Refused("weights are given in shared memory on Linux only; write a folder")
        self._segments: list[Path] = []
        try:
            for part in parts:
                self._segments.append(_FOLDER / f"openinfer-weights-{secrets.token_hex(16)}")
                _write(self._segments[-1], part)
        except BaseException:
            self.close()
            raise

    @property
    def names(self) -> tuple[str, ...]:
        """For `UpdateWeights.segments`."""
        return tuple(segment.name for segment in self._segments)

    def close(self) -> None:
        """Removes the segments. Idempotent."""
        while self._segments:
            self._segments.pop().unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def content_hash(tensors: Mapping[str, SharedTensor]) -> str:
    """256 bits in hexadecimal of every byte of some weights, for `UpdateWeights.content_hash`.

    The order of names does not matter, nor how tensors are spread over segments.
    """
    digest = hashlib.blake2b(digest_size=32, person=b"openinfer-shared")
    for name in sorted(tensors):
        tensor = tensors[name]
        head = msgspec.json.encode([name, tensor.dtype, tensor.shape])
        digest.update(len(head).to_bytes(8, "little") + head)
        digest.update(tensor.data)
    return digest.hexdigest()


def _parts(tensors: Mapping[str, SharedTensor], segment_bytes: int) -> Iterator[dict[str, SharedTensor]]:
    part: dict[str, SharedTensor] = {}
    num_bytes = 0
    for name, tensor in tensors.items():
        if part and num_bytes + tensor.data.nbytes > segment_bytes:
            yield part
            part, num_bytes = {}, 0
        part[name] = tensor
        num_bytes += tensor.data.nbytes
    if part:
        yield part


def _write(path: Path, part: Mapping[str, SharedTensor]) -> None:
    # Written, not mapped: where shared memory is short that is an error, and a map would end the process by a signal.
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as segment:
        segment.write(_header(part))
        for tensor in part.values():
            segment.write(tensor.data)


def _header(part: Mapping[str, SharedTensor]) -> bytes:
    entries: dict[str, object] = {}
    begin = 0
    for name, tensor in part.items():
        end = begin + tensor.data.nbytes
        entries[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (begin, end)}
        begin = end
    encoded = msgspec.json.encode(entries)
    encoded += b" " * (-len(encoded) % _ALIGN_BYTES)
    return len(encoded).to_bytes(_LENGTH_BYTES, "little") + encoded
