"""Blocks of quantised numbers in a GGUF file, taken apart into the arrays that products read: codes, scales, minimums.

A block has 32 neighbours of a row (https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h, `block_q4_0`):

    Q8_0    d float16 │ 32 int8                       d q
    Q4_0    d float16 │ 16 bytes                      d (q - 8)
    Q4_1    d float16 │ m float16 │ 16 bytes          d q + m

Byte `j` of the 16 has number `j` in its lower half and `j + 16` in its upper one.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from openinfer_engine.weights.safetensors_file import TensorInfo
from openinfer_engine.weights.stored_format import GGML_FORMATS, StoredFormat
from openinfer_kernels import Code, HostArray

_NUMBERS = 32
_HALF = _NUMBERS // 2
_BLOCKS: Mapping[str, np.dtype[Any]] = {
    "Q8_0": np.dtype([("scales", "<f2"), ("codes", "i1", (_NUMBERS,))]),
    "Q4_0": np.dtype([("scales", "<f2"), ("codes", "u1", (_HALF,))]),
    "Q4_1": np.dtype([("scales", "<f2"), ("minimums", "<f2"), ("codes", "u1", (_HALF,))]),
}


def parts_of(format_name: str, shape: tuple[int, ...]) -> dict[str, TensorInfo]:
    """What a matrix in a format of `GGML_FORMATS` is taken apart into: end of the name -> dtype and shape."""
    stored, (rows, columns) = GGML_FORMATS[format_name], shape
    grid = rows, columns // _NUMBERS
    codes = rows, columns * stored.format.code.bits // 8
    found = {stored.codes: _info(stored.code_dtypes[0], codes), stored.scales: _info("F16", grid)}
    return found | ({} if stored.minimums is None else {stored.minimums: _info("F16", grid)})


def read_part(blocks: HostArray, format_name: str, shape: tuple[int, ...], end: str) -> HostArray:
    """One of these parts, of the bytes of a whole matrix."""
    stored: StoredFormat = GGML_FORMATS[format_name]
    whole = blocks.view(_BLOCKS[format_name]).reshape(shape[0], -1)
    if end == stored.codes:
        codes = whole["codes"]
        in_order = _paired(codes) if stored.format.code is Code.INT4 else codes
        return in_order.reshape(shape[0], -1)
    return whole["scales" if end == stored.scales else "minimums"]


def _paired(codes: HostArray) -> HostArray:
    """Neighbours share a byte, the even one in its lower half."""
    out = np.empty_like(codes)
    for half, begin in ((codes & 15, 0), (codes >> 4, _HALF // 2)):
        out[..., begin : begin + _HALF // 2] = half[..., 0::2] | half[..., 1::2] << 4
    return out


def _info(dtype: str, shape: tuple[int, int]) -> TensorInfo:
    num_bytes = shape[0] * shape[1] * (2 if dtype == "F16" else 1)
    return TensorInfo(dtype=dtype, shape=shape, data_offsets=(0, num_bytes))
