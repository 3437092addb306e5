"""Quantised weights on a GPU: uploaded in the order that `csrc/weight_formats.cuh` reads them in."""

import ctypes

import numpy as np

from openinfer_kernels.cuda.arrays import require
from openinfer_kernels.cuda.device import Device
from openinfer_kernels.cuda.experts import check_weight
from openinfer_kernels.cuda.grouped_gemm import Epilogue, GroupedGemm
from openinfer_kernels.cuda.libraries import bfloat16, cupy
from openinfer_kernels.errors import ArrayMismatchError
from openinfer_kernels.ops import Array, HostArray, QuantisedWeight
from openinfer_kernels.quantised_blocks import common_block, scales_of, stacked_shape
from openinfer_kernels.quantised_parts import QuantisedPart, RandomCodes, WeightFormat

_THREADS = 256
_GROUP = 32
"""Columns of a scale on the device, whatever shares it in the checkpoint."""
_PITCH = 8
"""Scales in a row are a multiple of this, zeros behind the last, so that a chunk of them is always there."""
_FP8_FACTOR = 2.0**120
"""What codes lack when their bits are moved into those of BF16."""
_MOST_FP8_SCALE = 128.0
_CODES_PER_BYTE = {WeightFormat.FP8_BLOCKS: 1, WeightFormat.INT4_GROUPS: 2, WeightFormat.FP4_GROUPS: 2}


class Quantised:
    """Quantised weights and their products on one device."""

    def __init__(self, device: Device, gemm: GroupedGemm) -> None:
        self._gemm = gemm
        self._random = device.kernel("quantised", "random_codes")
        self._interleave = device.kernel("quantised", "interleave_nibbles")

    def upload_quantised(self, parts: tuple[QuantisedPart, ...], num_matrices: int | None) -> QuantisedWeight:
        """See `Ops.upload_quantised`. A code of NaN (E4M3 0x7F, 0xFF) is taken for 480.

        Raises:
            ArrayMismatchError: scales change inside 32 columns, or no kernel takes the shape.
            WeightDtypeError: codes or scales in a dtype that the format does not have.
            ValueError: parts that do not fit each other, scales that do not cover their codes or are too large.
        """
        shape = stacked_shape(parts, num_matrices)
        block = common_block(parts, shape)
        if block[1] % _GROUP:
            raise ArrayMismatchError(
                f"{parts[0].format} scales that change inside of {_GROUP} columns have no kernel on a GPU: this piece "
                f"has blocks of {block[1]} columns; cut it elsewhere, or run with --device cpu"
            )
        codes = self._upload_codes(parts, shape)
        scales = self._upload_scales(parts, shape, block)
        weight = QuantisedWeight(
            format=parts[0].format,
            shape=shape,
            codes=codes,
            scales=scales,
            block_rows=block[0],
            block_columns=block[1],
        )
        check_weight(weight, ndim=len(shape), what=f"a weight of {parts[0].format}")
        return weight

    def quantised_linear(self, x: Array, weight: QuantisedWeight) -> Array:
        """See `Ops.quantised_linear`.

        Raises:
            ArrayMismatchError: another dtype, layout or shape.
        """
        require(x, bfloat16, ndim=2, what="x")
        check_weight(weight, ndim=2, what="the weight")
        if x.shape[1] != weight.shape[1]:
            raise ArrayMismatchError(f"x {x.shape} and the weight {weight.shape} do not agree on the inner size")
        out = cupy.empty((len(x), weight.shape[0]), bfloat16)
        if len(x):
            self._gemm.multiply(x, weight, out, epilogue=Epilogue.STORE)
        return out

    def _upload_codes(self, parts: tuple[QuantisedPart, ...], shape: tuple[int, ...]) -> Array:
        """`[matrices.., out, bytes of a row]`."""
        row_bytes = shape[-1] // _CODES_PER_BYTE[parts[0].format]
        out = cupy.empty((sum(part.shape[0] for part in parts), row_bytes), np.uint8)
        begin = 0
        for part in parts:
            piece = out[begin : begin + part.shape[0]]
            begin += part.shape[0]
            if isinstance(part.codes, RandomCodes):
                self._fill(part.codes, piece)
            else:
                piece.set(np.ascontiguousarray(part.codes).view(np.uint8))
        if _CODES_PER_BYTE[parts[0].format] > 1 and out.size:
            words = out.size // 4
            self._interleave((-(-words // _THREADS), 1, 1), (_THREADS, 1, 1), [out, ctypes.c_int64(words)])
        return out.reshape(*shape[:-1], row_bytes)

    def _upload_scales(self, parts: tuple[QuantisedPart, ...], shape: tuple[int, ...], block: tuple[int, int]) -> Array:
        """`[matrices.., out / block rows, 32 columns each]`, in the format's own dtype."""
        scales = np.concatenate([scales_of(part, block) for part in parts])
        scales = np.repeat(scales, block[1] // _GROUP, axis=1)
        padded = np.zeros((len(scales), -(-scales.shape[1] // _PITCH) * _PITCH), np.float32)
        padded[:, : scales.shape[1]] = scales
        return cupy.asarray(_stored(padded, parts[0].format).reshape(*shape[:-2], -1, padded.shape[1]))

    def _fill(self, codes: RandomCodes, out: Array) -> None:
        """Computes a recipe into `out`."""
        sizes = out.size, out.shape[1], codes.row_length * codes.itemsize, codes.origin * codes.itemsize
        arguments = [out, *map(ctypes.c_int64, sizes), ctypes.c_uint64(codes.seed), ctypes.c_uint32(codes.mask)]
        if out.size:
            self._random((-(-out.size // _THREADS), 1, 1), (_THREADS, 1, 1), arguments)


def _stored(scales: HostArray, weight_format: WeightFormat) -> HostArray:
    """Scales as the kernels read them: what the checkpoint had, without loss."""
    if weight_format is WeightFormat.FP8_BLOCKS:
        if np.nanmax(np.abs(scales), initial=0) > _MOST_FP8_SCALE:
            raise ValueError(f"a scale of {np.nanmax(np.abs(scales))} is too large: at most {_MOST_FP8_SCALE}")
        return (scales.astype(np.float64) * _FP8_FACTOR).astype(np.float32)
    bits = scales.view(np.uint32)
    if weight_format is WeightFormat.INT4_GROUPS:
        return (bits >> 16).astype(np.uint16)
    exponents = bits >> 23  # of powers of two, which float32 has all but the smallest of as normal numbers
    return np.where(np.isnan(scales), 255, exponents).astype(np.uint8)
