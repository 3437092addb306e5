"""Copies between host and device, and weights in BF16.

All copies go in order with the kernels of CuPy's current stream. A host array may be reused as soon as a call returns:
the driver stages pageable memory before it does. Within `loading`, weights take the fast way of `uploads.py` instead.
"""

import ctypes
import math
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from openinfer_kernels.cpu.common.weights import upload_weight as to_float32
from openinfer_kernels.cuda.common.arrays import VECTOR_BYTES, address
from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.cuda.common.launch import Kernel
from openinfer_kernels.cuda.common.libraries import bfloat16, cupy
from openinfer_kernels.cuda.common.mapped_memory import temporaries
from openinfer_kernels.cuda.common.uploads import Check, Convert, Progress, Uploads
from openinfer_kernels.errors import WeightDtypeError
from openinfer_kernels.ops import Array, HostArray
from openinfer_kernels.weights.foreign import ForeignWeight
from openinfer_kernels.weights.plain import RandomWeight, WeightPart, stacked_shape

_THREADS = 256
_RANDOM_PER_THREAD = 8
_PLACING_BLOCKS = 64
"""Of one copy."""
_MOST_COPIES = 64
_PIECE_VALUES = 1 << 24
"""Values that are converted at once: bounds the memory in addition to the weight."""
_TO_DEVICE = 1
"""`cudaMemcpyHostToDevice`."""
_ON_DEVICE = 3
"""`cudaMemcpyDeviceToDevice`."""


class _WeightCopy(ctypes.Structure):
    """The struct of that name in `csrc/lora/lora.cu`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("source", "target")),
        *((name, ctypes.c_int64) for name in ("vectors", "row_vectors", "pitch")),
        ("scale", ctypes.c_float),
    )


class _WeightCopies(ctypes.Structure):
    _fields_ = (("each", _WeightCopy * _MOST_COPIES),)


class Memory:
    """The memory of one device."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._uploads: Uploads | None = None
        self._progress: Progress = _no_progress
        self._placing: Kernel | None = None
        self._random = device.kernel("random_weights", "random_weights")
        self._conversions = {
            np.dtype(dtype): device.kernel("weights", f"weights_from_{np.dtype(dtype).name}")
            for dtype in (np.float32, np.float16)
        }

    def upload(self, host: HostArray) -> Array:
        contiguous = np.ascontiguousarray(host).reshape(host.shape)
        out = cupy.empty(host.shape, host.dtype)
        _copy(contiguous, out)
        return out

    def upload_weight(self, *parts: WeightPart) -> Array:
        for part in parts:
            self._require_readable(part)
        out = cupy.empty(stacked_shape(parts), bfloat16)
        begin = 0
        for part in parts:
            piece = out[begin : begin + len(part)]
            begin += len(part)
            if isinstance(part, RandomWeight):
                self._fill(part, piece)
            elif isinstance(part, ForeignWeight):
                self._take(part, piece)
            elif self._uploads is not None:
                self._uploads.add(part, piece)
            else:
                self._write(part, piece)
        return out

    def upload_weight_now(self, *parts: WeightPart) -> Array:
        """As `upload_weight`, on the current stream also within `loading`, which is not told of it."""
        before, self._uploads, self._progress = (self._uploads, self._progress), None, _no_progress
        try:
            return self.upload_weight(*parts)
        finally:
            self._uploads, self._progress = before

    def upload_float32(self, *parts: WeightPart) -> Array:
        # Made on the host: what stays float32 is short.
        out = self.upload(to_float32(*parts))
        self._progress(out.nbytes)
        return out

    def upload_codes(self, host: HostArray, out: Array, convert: Convert, check: Check | None = None) -> None:
        """Brings `host`, of any strides, to the device, where `convert` writes it into `out`; put off in `loading`.

        `check` looks at it on the way; what it raises ends `loading`, or this call.
        """
        if self._uploads is not None:
            self._uploads.add(host, out, convert, check)
        else:
            self.upload_codes_now(host, out, convert, check)

    def upload_codes_now(self, host: HostArray, out: Array, convert: Convert, check: Check | None = None) -> None:
        """As `upload_codes`, on the current stream also within `loading`."""
        if check is not None:
            check(np.ascontiguousarray(host))
        with temporaries():
            convert(self.upload(host), out)
        self._progress(out.nbytes)

    def write_now(self, host: HostArray, out: Array) -> None:
        """Brings float32, float16 or BF16's bits into `out` on the current stream, also within `loading`."""
        self._write(host, out)
        self._progress(out.nbytes)

    def tell(self, num_bytes: int) -> None:
        """Counts bytes that did not come through `upload_codes`."""
        self._progress(num_bytes)

    @contextmanager
    def loading(self, progress: Progress = lambda num_bytes: None) -> Generator[None]:
        if self._uploads is not None:
            raise RuntimeError("weights are being loaded already")
        cupy.cuda.get_current_stream().synchronize()  # the copies have streams of their own
        self._uploads = uploads = Uploads(self._device, convert=self._convert, progress=progress)
        self._progress = progress
        try:
            yield
            uploads.finish()
        finally:
            self._uploads, self._progress = None, _no_progress
            # Unpinning takes 0.05 s, which the start need not wait for.
            threading.Thread(target=uploads.close, name="openinfer-unpin").start()
        cupy.cuda.get_current_stream().synchronize()

    def download(self, array: Array) -> HostArray:
        """A copy in host memory, after everything before it on the stream; BF16 arrives as `ml_dtypes.bfloat16`."""
        return cupy.asnumpy(array)

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any] | type[Any] | None = None) -> Array:
        return cupy.zeros(shape, bfloat16 if dtype is None else dtype)

    def host_weights(self, num_values: int) -> HostArray:
        self._device.use()  # a new thread's device is GPU 0 otherwise
        nbytes = num_values * bfloat16.itemsize
        memory: Any = cupy.cuda.alloc_pinned_memory(nbytes)
        return np.frombuffer(memory, np.uint8, nbytes).view(bfloat16)

    def copy_weights(
        self, copies: Sequence[tuple[HostArray | None, Array]], *, scales: Sequence[float] | None = None
    ) -> None:
        # By a kernel that reads host memory: to queue a copy takes the host longer than its bytes need.
        if self._placing is None:
            self._placing = self._device.kernel("lora", "lora_place_weights")
        told = [_weight_copy(*each) for each in copies]
        for each, scale in zip(told, scales or [1.0] * len(told), strict=True):
            each.scale = scale
        for first in range(0, len(told), _MOST_COPIES):
            some = told[first : first + _MOST_COPIES]
            vectors = max(each.vectors for each in some)
            blocks = min(_PLACING_BLOCKS, -(-vectors // _THREADS))
            self._placing(
                (max(1, blocks), len(some), 1), (_THREADS, 1, 1), [_WeightCopies((_WeightCopy * _MOST_COPIES)(*some))]
            )

    def copy_rows(self, array: Array, *, sources: Sequence[int], targets: Sequence[int]) -> None:
        row_bytes, stream = array[0].nbytes, cupy.cuda.get_current_stream().ptr
        for source, target in zip(sources, targets, strict=True):
            places = (address(array) + row * row_bytes for row in (target, source))
            cupy.cuda.runtime.memcpyAsync(*places, row_bytes, _ON_DEVICE, stream)

    def rounded(self, values: Array) -> Array:
        """A copy of float32 in BF16."""
        out = cupy.empty(values.shape, bfloat16)
        if values.size:
            self._convert(values, out)
        return out

    def _require_readable(self, part: WeightPart) -> None:
        if not isinstance(part, RandomWeight) and part.dtype != np.uint16 and part.dtype not in self._conversions:
            raise WeightDtypeError(
                f"a weight of dtype {part.dtype} was uploaded; possible are float32, float16, and uint16 for BF16 bits"
            )

    def _write(self, host: HostArray, out: Array) -> None:
        values, written = np.ascontiguousarray(host).reshape(-1), out.reshape(-1)
        if host.dtype == np.uint16:
            _copy(values, written)
            return
        for start in range(0, values.size, _PIECE_VALUES):
            piece = slice(start, start + _PIECE_VALUES)
            with temporaries():
                self._convert(self.upload(values[piece]), written[piece])

    def _convert(self, values: Array, out: Array) -> None:
        grid = (-(-values.size // _THREADS), 1, 1)
        self._conversions[values.dtype](grid, (_THREADS, 1, 1), [values, out, ctypes.c_int64(values.size)])

    def _take(self, weight: ForeignWeight, out: Array) -> None:
        values = weight.row_values
        if not out.size:
            return
        written = out.reshape(-1, values)
        at_once = max(1, _PIECE_VALUES // values)
        for begin in range(0, len(written), at_once):
            piece = written[begin : begin + at_once]
            if weight.dtype == np.uint16:
                weight.copy(begin, piece)
                continue
            with temporaries():
                copied = cupy.empty(piece.shape, weight.dtype)
                weight.copy(begin, copied)
                self._convert(copied, piece)
        self._progress(out.nbytes)

    def _fill(self, weight: RandomWeight, out: Array) -> None:
        arguments = [
            out,
            ctypes.c_int64(out.size),
            ctypes.c_int64(math.prod(weight.shape[1:])),
            ctypes.c_int64(weight.row_length),
            ctypes.c_int64(weight.origin),
            ctypes.c_uint64(weight.seed),
            ctypes.c_float(weight.mean),
            ctypes.c_float(weight.spread),
        ]
        if out.size:
            self._random(((-(-out.size // (_THREADS * _RANDOM_PER_THREAD))), 1, 1), (_THREADS, 1, 1), arguments)
            self._progress(out.nbytes)


def _no_progress(num_bytes: int) -> None:
    del num_bytes


def _copy(host: HostArray, out: Array) -> None:
    if host.nbytes:
        stream = cupy.cuda.get_current_stream().ptr
        cupy.cuda.runtime.memcpyAsync(address(out), host.ctypes.data, host.nbytes, _TO_DEVICE, stream)


def _weight_copy(host: HostArray | None, array: Array) -> _WeightCopy:
    vectors = array.nbytes // VECTOR_BYTES
    is_whole = array.flags.c_contiguous
    row_vectors = vectors if is_whole else array.shape[1] * array.dtype.itemsize // VECTOR_BYTES
    pitch = array.nbytes if is_whole else array.strides[0]
    return _WeightCopy(None if host is None else host.ctypes.data, address(array), vectors, row_vectors, pitch)
