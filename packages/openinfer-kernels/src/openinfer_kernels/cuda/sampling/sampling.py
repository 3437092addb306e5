"""Drawing one token per row on the device. `csrc/sampling/sampling.cu` says how."""

import ctypes
from typing import Any

import numpy as np

from openinfer_kernels.cuda.common.arrays import address, fits_vectors, require
from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.cuda.common.libraries import cupy
from openinfer_kernels.cuda.sampling.clusters import THREADS, cluster_blocks, require_logits, slice_columns
from openinfer_kernels.errors import ArrayMismatchError
from openinfer_kernels.ops import Array, Bias, Penalties, SamplingBatch, TokenMask
from openinfer_kernels.ops.sampling_columns import COLUMN_DTYPES

_INT32, _UINT32 = np.dtype(np.int32), np.dtype(np.uint32)
_FLOAT32, _BOOL = np.dtype(np.float32), np.dtype(np.bool_)


class _Bias(ctypes.Structure):
    _fields_ = (
        ("rows", ctypes.c_void_p),
        ("counts", ctypes.c_void_p),
        ("token_ids", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("count", ctypes.c_int),
        ("width", ctypes.c_int),
    )


class _Penalties(ctypes.Structure):
    _fields_ = (
        ("rows", ctypes.c_void_p),
        ("presence", ctypes.c_void_p),
        ("frequency", ctypes.c_void_p),
        ("repetition", ctypes.c_void_p),
        ("output_counts", ctypes.c_void_p),
        ("prompt_seen", ctypes.c_void_p),
        ("count", ctypes.c_int),
    )


class _TokenMask(ctypes.Structure):
    _fields_ = (("rows", ctypes.c_void_p), ("bits", ctypes.c_void_p), ("count", ctypes.c_int))


class _Arguments(ctypes.Structure):
    """`Arguments` of the kernel, field by field."""

    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
        *((name, ctypes.c_void_p) for name in COLUMN_DTYPES),
        ("num_columns", ctypes.c_int),
        ("num_token_ids", ctypes.c_int),
        ("slice", ctypes.c_int),
        ("is_wide", ctypes.c_int),
        ("bias", _Bias),
        ("penalties", _Penalties),
        ("mask", _TokenMask),
    )


class Sampling:
    """The operator on one device."""

    def __init__(self, device: Device) -> None:
        self._cluster_blocks = cluster_blocks(device)
        self._kernels = {name: device.kernel("sampling", f"sample_{name}") for name in ("bfloat16", "float32")}

    def sample(self, logits: Array, sampling: SamplingBatch) -> Array:
        """The host reads nothing; the launch depends on R, V and which changes are there."""
        require_logits(logits)
        num_rows, num_columns = logits.shape
        _check(sampling, num_rows, num_columns)
        tokens = cupy.empty(num_rows, np.int32)
        if num_rows == 0:
            return tokens
        columns = slice_columns(sampling.num_token_ids, self._cluster_blocks)
        is_wide = num_columns % 8 == 0 and fits_vectors(*_read_in_vectors(logits, sampling.penalties))
        # The kernel reads a row several times: the row itself, unless it is changed or cannot be read by 16 bytes.
        needs_scratch = not is_wide or _has_changes(sampling)
        scratch = cupy.empty(num_rows * self._cluster_blocks * columns, np.float32) if needs_scratch else None
        arguments = _Arguments(
            logits=address(logits),
            scratch=_pointer(scratch),
            tokens=address(tokens),
            **{name: address(getattr(sampling, name)) for name in COLUMN_DTYPES},
            num_columns=num_columns,
            num_token_ids=sampling.num_token_ids,
            slice=columns,
            is_wide=is_wide,
            bias=_bias(sampling.bias),
            penalties=_penalties(sampling.penalties),
            mask=_mask(sampling.token_mask),
        )
        kernel = self._kernels[logits.dtype.name]
        kernel((num_rows * self._cluster_blocks, 1, 1), (THREADS, 1, 1), [arguments], overlap=True)
        return tokens


def _has_changes(sampling: SamplingBatch) -> bool:
    return any(change is not None for change in (sampling.bias, sampling.penalties, sampling.token_mask))


def _read_in_vectors(logits: Array, penalties: Penalties | None) -> list[Array]:
    return [logits] if penalties is None else [logits, penalties.output_counts, penalties.prompt_seen]


def _pointer(array: Array | None) -> int | None:
    return None if array is None else address(array)


def _bias(bias: Bias | None) -> _Bias:
    if bias is None:
        return _Bias()
    return _Bias(*map(address, (bias.rows, bias.counts, bias.token_ids, bias.values)), *bias.token_ids.shape)


def _penalties(penalties: Penalties | None) -> _Penalties:
    if penalties is None:
        return _Penalties()
    arrays = (
        penalties.rows,
        penalties.presence,
        penalties.frequency,
        penalties.repetition,
        penalties.output_counts,
        penalties.prompt_seen,
    )
    return _Penalties(*map(address, arrays), len(penalties.rows))


def _mask(mask: TokenMask | None) -> _TokenMask:
    return _TokenMask() if mask is None else _TokenMask(address(mask.rows), address(mask.bits), len(mask.rows))


def _check(sampling: SamplingBatch, num_rows: int, num_columns: int) -> None:
    if not 0 < sampling.num_token_ids <= num_columns:
        raise ArrayMismatchError(
            f"num_token_ids is {sampling.num_token_ids}; it must be from 1 to {num_columns}, the columns of the logits"
        )
    for name, dtype in COLUMN_DTYPES.items():
        _require(getattr(sampling, name), dtype, (num_rows,), f"sampling.{name}")
    if sampling.bias is not None:
        _check_bias(sampling.bias)
    if sampling.penalties is not None:
        _check_penalties(sampling.penalties, num_columns)
    if sampling.token_mask is not None:
        rows, words = sampling.token_mask.rows, -(-num_columns // 32)
        _require(rows, _INT32, (len(rows),), "token_mask.rows")
        _require(sampling.token_mask.bits, _UINT32, (len(rows), words), "token_mask.bits")


def _check_bias(bias: Bias) -> None:
    count = len(bias.rows)
    _require(bias.rows, _INT32, (count,), "bias.rows")
    _require(bias.counts, _INT32, (count,), "bias.counts")
    require(bias.token_ids, _INT32, ndim=2, what="bias.token_ids")
    _require(bias.values, _FLOAT32, (count, bias.token_ids.shape[1]), "bias.values")


def _check_penalties(penalties: Penalties, num_columns: int) -> None:
    count = len(penalties.rows)
    _require(penalties.rows, _INT32, (count,), "penalties.rows")
    for name in ("presence", "frequency", "repetition"):
        _require(getattr(penalties, name), _FLOAT32, (count,), f"penalties.{name}")
    _require(penalties.output_counts, _INT32, (count, num_columns), "penalties.output_counts")
    _require(penalties.prompt_seen, _BOOL, (count, num_columns), "penalties.prompt_seen")


def _require(array: Array, dtype: np.dtype[Any], shape: tuple[int, ...], what: str) -> None:
    require(array, dtype, ndim=len(shape), what=what)
    if array.shape != shape:
        raise ArrayMismatchError(f"{what} has shape {array.shape}, not {shape}")
