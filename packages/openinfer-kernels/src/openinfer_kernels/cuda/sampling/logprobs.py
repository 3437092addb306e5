"""Log-probabilities and ranks of tokens under rows of logits. `csrc/sampling/logprobs.cu` says how."""

import ctypes

import numpy as np

from openinfer_kernels.cuda.common.arrays import address, fits_vectors, require
from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.cuda.common.libraries import cupy
from openinfer_kernels.cuda.sampling.clusters import THREADS, cluster_blocks, require_logits, slice_columns
from openinfer_kernels.errors import ArrayMismatchError
from openinfer_kernels.ops import Array, Logprobs

MAX_TOP = 1024
_INT32 = np.dtype(np.int32)


class _Arguments(ctypes.Structure):
    """`Arguments` of the kernel, field by field."""

    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("token_ids", ctypes.c_void_p),
        ("chosen", ctypes.c_void_p),
        ("ranks", ctypes.c_void_p),
        ("top_ids", ctypes.c_void_p),
        ("top", ctypes.c_void_p),
        ("num_columns", ctypes.c_int),
        ("num_top", ctypes.c_int),
        ("slice", ctypes.c_int),
        ("is_wide", ctypes.c_int),
    )


class LogprobsKernels:
    """The operator on one device."""

    def __init__(self, device: Device) -> None:
        self._cluster_blocks = cluster_blocks(device)
        self._kernels = {name: device.kernel("logprobs", f"logprobs_{name}") for name in ("bfloat16", "float32")}

    def logprobs(self, logits: Array, token_ids: Array, *, top: int) -> Logprobs:
        require_logits(logits)
        require(token_ids, _INT32, ndim=1, what="token_ids")
        num_rows, num_columns = logits.shape
        if len(token_ids) != num_rows:
            raise ArrayMismatchError(f"{len(token_ids)} token_ids were given for {num_rows} rows of logits")
        if not 0 <= top <= min(num_columns, MAX_TOP):
            raise ArrayMismatchError(f"top is {top}; it must be from 0 to {min(num_columns, MAX_TOP)}")
        result = Logprobs(
            chosen=cupy.empty(num_rows, np.float32),
            ranks=cupy.empty(num_rows, np.int32),
            top_ids=cupy.empty((num_rows, top), np.int32),
            top=cupy.empty((num_rows, top), np.float32),
        )
        if num_rows > 0:
            self._launch(logits, token_ids, result)
        return result

    def _launch(self, logits: Array, token_ids: Array, result: Logprobs) -> None:
        num_rows, num_columns = logits.shape
        arguments = _Arguments(
            logits=address(logits),
            token_ids=address(token_ids),
            chosen=address(result.chosen),
            ranks=address(result.ranks),
            top_ids=address(result.top_ids),
            top=address(result.top),
            num_columns=num_columns,
            num_top=result.top.shape[1],
            slice=slice_columns(num_columns, self._cluster_blocks),
            is_wide=num_columns % 8 == 0 and fits_vectors(logits),
        )
        kernel = self._kernels[logits.dtype.name]
        kernel((num_rows * self._cluster_blocks, 1, 1), (THREADS, 1, 1), [arguments], overlap=True)
