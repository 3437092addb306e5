"""Quantised weights on a GPU: uploaded in the order of the kernels that multiply them.

matrices on Hopper           tiles of `lowbit_tiles.py`, for `lowbit_gemm.py`; experts for `lowbit_experts.py`
several in one, other GPUs   the order of `csrc/gemm/weight_formats.cuh`, for `grouped_gemm.py`
formats without a kernel     tiles, dequantised at each product; or BF16, dequantised when they are loaded

`weights/gpu_kernels.py` says which.
"""

import ctypes
import math
from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from openinfer_kernels.cpu.common.random_weight import random_codes
from openinfer_kernels.cpu.gemm.quantised import upload_dequantised as host_dequantised
from openinfer_kernels.cuda.common.arrays import fits_vectors, require
from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.cuda.common.launch import Kernel
from openinfer_kernels.cuda.common.libraries import bfloat16, cupy
from openinfer_kernels.cuda.common.mapped_memory import temporaries
from openinfer_kernels.cuda.common.memory import Memory
from openinfer_kernels.cuda.common.uploads import Check, Convert
from openinfer_kernels.cuda.gemm import dispatch
from openinfer_kernels.cuda.gemm.grouped_gemm import NAMES, Epilogue, GroupedGemm, kernels_of_format
from openinfer_kernels.cuda.gemm.linear import Linear
from openinfer_kernels.cuda.gemm.tiles import Epilogue as DenseEpilogue
from openinfer_kernels.cuda.lowbit.lowbit_experts import LowbitExperts
from openinfer_kernels.cuda.lowbit.lowbit_gemm import LowbitGemm
from openinfer_kernels.cuda.lowbit.lowbit_tiles import LowbitTiles, TiledWeight
from openinfer_kernels.cuda.moe.experts import check_weight
from openinfer_kernels.errors import ArrayMismatchError, WeightValueError
from openinfer_kernels.ops import Array, HostArray, LinearWeight, QuantisedWeight
from openinfer_kernels.weights.code_values import require_numbers
from openinfer_kernels.weights.gpu_kernels import GROUP as _GROUP
from openinfer_kernels.weights.gpu_kernels import Way, rows_hold, tiles_hold, way_of
from openinfer_kernels.weights.quantised import Code, QuantisedPart, RandomCodes
from openinfer_kernels.weights.scale_blocks import common_block, float32_scales, of_blocks, stacked_shape

_THREADS = 128
_UNIT_BYTES = 16
_BLOCK_BYTES = 64
"""That are put in order together; a row has whole ones, zeros at its end."""
_GATED_ROWS = 64
"""Of gate, and of up, which a kernel that gates takes together."""
_PITCH = 16
"""Scales in a row are a multiple of this, zeros after the last, so that a chunk of them is always there."""

_Bring: TypeAlias = Callable[[HostArray, Array, Convert, Check | None], None]
"""Copies codes to the device and converts them into their place."""
_DENSE_VALUES = 1 << 26
"""That are dequantised at once on the host: bounds its memory."""


class Quantised:
    """Quantised weights and their products on one device."""

    def __init__(
        self, device: Device, gemm: GroupedGemm, memory: Memory, linear: Linear, experts: LowbitExperts | None = None
    ) -> None:
        """`experts` multiply those that are in tiles; None: there are none in tiles."""
        self._gemm = gemm
        self._memory = memory
        self._linear = linear
        # Sums of its kernels depend on how many tokens there are, which a product that does not choose must not.
        self._has_lowbit = gemm.chooses and LowbitGemm.there_is_one(device)
        self._tiles = LowbitTiles(device, memory)
        self._lowbit = LowbitGemm(device)
        self._experts = experts
        self._dequantise = {each: device.kernel("quantised", f"dequantise_{each}") for each in NAMES}
        self._random = device.kernel("quantised", "random_codes")
        self._arrangements = {each: device.kernel("quantised", f"arrange_{each}") for each in NAMES}

    def upload_quantised(
        self, *parts: QuantisedPart, num_matrices: int | None = None, grouped: bool = False
    ) -> LinearWeight:
        """A format without a kernel here becomes a plain weight where nothing holds it as it is: `way_of`."""
        shape, block, way = self._placed(parts, num_matrices, grouped=grouped)
        if way is Way.BF16:
            return self._dense(parts, shape, block)
        return self._upload(parts, shape, block, way, self._memory.upload_codes)

    def upload_dequantised(self, *parts: QuantisedPart) -> Array:
        return self._dense(parts, *self._placed(parts, None)[:2])

    def _placed(
        self, parts: tuple[QuantisedPart, ...], num_matrices: int | None, *, grouped: bool = False
    ) -> tuple[tuple[int, ...], tuple[int, int], Way]:
        shape = stacked_shape(parts, num_matrices)
        block = common_block(parts, shape)
        way = way_of(
            parts[0].format,
            block,
            shape,
            has_lowbit=self._has_lowbit,
            grouped=grouped or self._experts is None,
        )
        return shape, block, way

    def _dense(self, parts: tuple[QuantisedPart, ...], shape: tuple[int, ...], block: tuple[int, int]) -> Array:
        """In BF16, rounded once; it is there when this returns, also within `loading`."""
        made, flat = parts[0].format, (math.prod(shape[:-1]), shape[-1])
        in_rows = rows_hold(made, block, flat)
        if not in_rows and not tiles_hold(made, block, flat):
            return self._dense_from_host(parts, shape)
        way = Way.ROWS if in_rows else Way.TILES
        return self.dequantised(self._upload(parts, flat, block, way, self._memory.upload_codes_now)).reshape(shape)

    def _dense_from_host(self, parts: tuple[QuantisedPart, ...], shape: tuple[int, ...]) -> Array:
        out = cupy.empty((math.prod(shape[:-1]), shape[-1]), bfloat16)
        step, begin = max(1, _DENSE_VALUES // shape[-1]), 0
        for part in parts:
            for first in range(0, part.shape[0], step):
                piece = host_dequantised(part.rows(first, min(first + step, part.shape[0])))
                self._memory.write_now(piece, out[begin : begin + len(piece)])
                begin += len(piece)
        return out.reshape(shape)

    def _upload(
        self, parts: tuple[QuantisedPart, ...], shape: tuple[int, ...], block: tuple[int, int], way: Way, bring: _Bring
    ) -> QuantisedWeight:
        if way is not Way.ROWS:
            return self._upload_tiles(parts, shape, block, bring)
        weight = QuantisedWeight(
            format=parts[0].format,
            shape=shape,
            codes=self._upload_codes(parts, shape, bring),
            scales=self._upload_scales(parts, shape, block),
            block_rows=block[0],
            block_columns=block[1],
        )
        check_weight(weight, ndim=len(shape), what=f"a weight of {parts[0].format}")
        return weight

    def linear(self, x: Array, weight: QuantisedWeight) -> Array:
        require(x, bfloat16, ndim=2, what="x")
        check_weight(weight, ndim=2, what="the weight")
        if x.shape[1] != weight.shape[1]:
            raise ArrayMismatchError(f"x {x.shape} and the weight {weight.shape} do not agree on the inner size")
        if isinstance(weight, TiledWeight):
            return self._multiply_tiles(x, weight, DenseEpilogue.STORE)
        tile_tokens = dispatch.tile_of(kernels_of_format(weight.format), len(x))
        if self._gemm.chooses and tile_tokens is None:
            # The copy is made by the kernel just ahead: a product that reads its weight early would read it unfinished.
            return self._linear.linear(x, self.dequantised(weight), weights_first=False)
        out = cupy.empty((len(x), weight.shape[0]), bfloat16)
        if len(x):
            self._gemm.multiply(x, weight, out, epilogue=Epilogue.STORE, tile_tokens=tile_tokens)
        return out

    def linear_swiglu(self, x: Array, gate_up: QuantisedWeight) -> Array | None:
        """None where no kernel gates what it multiplies."""
        if not isinstance(gate_up, TiledWeight) or gate_up.shape[0] % (2 * _GATED_ROWS):
            return None
        require(x, bfloat16, ndim=2, what="x")
        check_weight(gate_up, ndim=2, what="gate and up")
        if x.shape[1] != gate_up.shape[1]:
            raise ArrayMismatchError(f"x {x.shape} and the weight {gate_up.shape} do not agree on the inner size")
        return self._multiply_tiles(x, gate_up, DenseEpilogue.SWIGLU)

    def _multiply_tiles(self, x: Array, weight: TiledWeight, epilogue: DenseEpilogue) -> Array:
        gates = epilogue is DenseEpilogue.SWIGLU
        most_tokens = dispatch.most_lowbit_tokens(weight.kernels, scales_are_bf16=weight.scales_are_bf16)
        if not self._has_lowbit or len(x) > most_tokens:
            dense = self.dequantised(weight)
            multiply = self._linear.linear_swiglu if gates else self._linear.linear
            return multiply(x, dense, weights_first=False)
        out = cupy.empty((len(x), weight.shape[0] // (2 if gates else 1)), bfloat16)
        if len(x):
            self._lowbit.multiply(x if fits_vectors(x) else x.copy(), weight, out, epilogue=epilogue)
        return out

    def dequantised(self, weight: QuantisedWeight) -> Array:
        if isinstance(weight, TiledWeight):
            return self._tiles.dequantised(weight)
        *matrices, height, k = weight.shape
        rows = math.prod(matrices) * height
        out = cupy.empty(weight.shape, bfloat16)
        row_bytes = weight.codes.shape[-1]
        sizes = k, row_bytes, weight.block_rows, weight.scales.strides[-2]
        grid = (rows, -(-row_bytes // (_UNIT_BYTES * _THREADS)), 1)
        arguments = [weight.codes, weight.scales, out, *map(ctypes.c_int, sizes)]
        self._dequantise[kernels_of_format(weight.format)](grid, (_THREADS, 1, 1), arguments, overlap=True)
        return out

    def _upload_tiles(
        self, parts: tuple[QuantisedPart, ...], shape: tuple[int, ...], block: tuple[int, int], bring: _Bring
    ) -> TiledWeight:
        weight = self._tiles.empty(parts[0].format, block, (math.prod(shape[:-1]), shape[-1]))
        check_weight(weight, ndim=2, what=f"a weight of {parts[0].format}")
        if len(shape) == 3 and self._experts is not None:
            self._experts.load(weight.kernels)
        elif self._has_lowbit:
            self._lowbit.load(weight.kernels)
        self._tiles.fill_scales(weight, parts)
        begin = 0
        for part in parts:
            place = self._tiles.place(weight, first_row=begin)
            begin += part.shape[0]
            target = place.view(part.shape[0])
            if isinstance(part.codes, RandomCodes):
                with temporaries():
                    words = cupy.empty_like(target)
                self._fill(part.codes, words)
                place(words, target)
            else:
                bring(_words_of(part, padding_bytes=0), target, place, _check_of(part))
        return replace(weight, shape=shape)

    def _upload_codes(self, parts: tuple[QuantisedPart, ...], shape: tuple[int, ...], bring: _Bring) -> Array:
        """`[matrices.., out, bytes of a row]`, in the kernels' order."""
        row_bytes = shape[-1] * parts[0].format.code.bits // 8
        padded_bytes = -(-row_bytes // _BLOCK_BYTES) * _BLOCK_BYTES
        out = cupy.empty((sum(part.shape[0] for part in parts), padded_bytes), np.uint8)
        arrangement = self._arrangements[kernels_of_format(parts[0].format)]
        begin = 0
        for part in parts:
            piece = out[begin : begin + part.shape[0]].view(np.uint32)
            begin += part.shape[0]
            if isinstance(part.codes, RandomCodes) and padded_bytes == row_bytes:
                self._fill(part.codes, piece)
                _Arrange(arrangement)(piece, piece)
            else:
                words = _words_of(part, padding_bytes=padded_bytes - row_bytes)
                bring(words, piece, _Arrange(arrangement), _check_of(part))
        return out.reshape(*shape[:-1], padded_bytes)

    def _upload_scales(self, parts: tuple[QuantisedPart, ...], shape: tuple[int, ...], block: tuple[int, int]) -> Array:
        """`[matrices.., out / block rows, 32 columns each]`: as they are stored, but float32 for FP8."""
        if parts[0].format.code is Code.E4M3:
            scales = np.concatenate([float32_scales(part, block) for part in parts])
        else:
            scales = np.concatenate([of_blocks(part, part.scales, block) for part in parts])
        if block[1] > _GROUP:
            # Kernels know one width of a block: the scales of wider ones are repeated.
            scales = np.repeat(scales, block[1] // _GROUP, axis=1)
        if scales.shape[1] % _PITCH:
            scales = np.pad(scales, ((0, 0), (0, -scales.shape[1] % _PITCH)))
        self._memory.tell(scales.nbytes)
        return self._memory.upload(scales.reshape(*shape[:-2], -1, scales.shape[1]))

    def _fill(self, codes: RandomCodes, words: Array) -> None:
        row_bytes = words.shape[1] * words.itemsize
        sizes = words.nbytes, row_bytes, codes.row_length * codes.itemsize, codes.origin * codes.itemsize
        arguments = [words, *map(ctypes.c_int64, sizes), ctypes.c_uint64(codes.seed), ctypes.c_uint32(codes.mask)]
        if words.size:
            self._random((-(-words.nbytes // _THREADS), 1, 1), (_THREADS, 1, 1), arguments)
            self._memory.tell(words.nbytes)


class _Arrange:
    """Puts codes that have come to the device into the kernels' order; in place as well; from any thread."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def __call__(self, words: Array, out: Array) -> None:
        blocks = words.nbytes // _BLOCK_BYTES
        if blocks:
            grid = (-(-blocks // _THREADS), 1, 1)
            self._kernel(grid, (_THREADS, 1, 1), [words, out, ctypes.c_int64(words.size)])


def _check_of(part: QuantisedPart) -> Check | None:
    """Refuses codes of NaN, of which those of E4M3 are the only ones; None where there is nothing to look at."""
    if part.format.code is not Code.E4M3 or isinstance(part.codes, RandomCodes):
        return None
    named = f"{part.name}: " if part.name else ""

    def check(words: HostArray) -> None:
        try:
            require_numbers(words.reshape(-1).view(np.uint8))
        except WeightValueError as error:
            raise WeightValueError(f"{named}{error}") from error

    return check


def _words_of(part: QuantisedPart, *, padding_bytes: int) -> HostArray:
    """Codes as words `[out, words of a row]`, zeros at their end; a view where nothing is missing."""
    codes = random_codes(part.codes) if isinstance(part.codes, RandomCodes) else part.codes
    if codes.strides[1] != codes.itemsize or padding_bytes:
        codes = np.pad(np.ascontiguousarray(codes).view(np.uint8), ((0, 0), (0, padding_bytes)))
    return codes.view(np.uint32)
