"""W8A8 on Hopper: prompts' activations are quantised by a kernel of ours, and the codes multiplied by cuBLASLt.

    x ── quantise ──► codes, scales ──┐
                                      ├──► cuBLASLt ──► y, or for INT8 int32 ── scale (and gate) ──► y
    tiles ── rows_of_tiles ──► codes ─┘

The library wants a weight by rows, which lies in tiles for decoding: a step copies it, one matrix at a time, for two
bytes of traffic per weight, in place of a second copy in memory.
"""

import ctypes

import numpy as np

from openinfer_kernels.cuda.common.arrays import fits_vectors, require
from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.cuda.common.libraries import bfloat16, cupy
from openinfer_kernels.cuda.gemm.linear import Linear
from openinfer_kernels.cuda.gemm.scaled_products import TOKENS_ALIGNMENT, ScaledProducts, Scaling, result_dtype
from openinfer_kernels.cuda.lowbit.lowbit_tiles import TiledWeight
from openinfer_kernels.errors import ArrayMismatchError
from openinfer_kernels.ops import Array, QuantisedWeight
from openinfer_kernels.weights.low_bit_activations import BLOCK, group_columns
from openinfer_kernels.weights.quantised import Code

_STEM = "low_bit_activations"
_ROW_THREADS, _THREADS, _VALUES = 256, 128, 8
_PITCH = 4
"""cuBLASLt's rows of scales of blocks begin at multiples of this."""


class LowBitActivations:
    """The products on one device."""

    def __init__(self, device: Device, linear: Linear) -> None:
        self._linear = linear
        self._products = ScaledProducts()
        self._rows = {each: device.kernel(_STEM, f"quantise_rows_{each}") for each in ("fp8", "int8")}
        self._groups = device.kernel(_STEM, "quantise_groups_fp8")
        self._copies = {each: device.kernel(_STEM, f"rows_of_tiles_{each}") for each in ("fp8", "int8")}
        self._scale = {each: device.kernel(_STEM, f"scale_sums_{each}") for each in ("store", "swiglu")}

    def serves(self, weight: QuantisedWeight) -> bool:
        """Whether products with a weight may have quantised activations."""
        return isinstance(weight, TiledWeight) and _group(weight) is not None

    def linear(self, x: Array, weight: QuantisedWeight) -> Array:
        scaling, products, scales = self._multiply(x, weight)
        return self._scaled("store", products, scales, len(x)) if scaling is Scaling.INTEGERS else products[: len(x)]

    def linear_swiglu(self, x: Array, gate_up: QuantisedWeight) -> Array:
        scaling, products, scales = self._multiply(x, gate_up)
        if scaling is Scaling.INTEGERS:
            return self._scaled("swiglu", products, scales, len(x))
        return self._linear.swiglu(products[: len(x)])

    def quantise_rows(self, matrix: Array) -> tuple[Array, Array]:
        """Codes `[rows, columns]` in E4M3 and a scale of each row, float32, of a matrix in BF16."""
        return self._quantise_rows(matrix, "fp8", len(matrix))

    def close(self) -> None:
        self._products.close()

    def _multiply(self, x: Array, weight: QuantisedWeight) -> tuple[Scaling, Array, tuple[Array, Array]]:
        """What `Scaling` says, for the tokens of `x` and some more; and the scales of the weight and of the tokens."""
        require(x, bfloat16, ndim=2, what="x")
        if not isinstance(weight, TiledWeight) or x.shape[1] != weight.shape[1]:
            raise ArrayMismatchError(f"x {x.shape} and the weight {weight.shape} do not agree on the inner size")
        x = x if fits_vectors(x) else x.copy()
        scaling = _scaling(weight)
        num_tokens = -(-len(x) // TOKENS_ALIGNMENT) * TOKENS_ALIGNMENT
        if scaling is Scaling.BLOCKS:
            codes, token_scales = self._quantise_groups(x, num_tokens)
        else:
            codes, token_scales = self._quantise_rows(x, weight.kernels, num_tokens)
        rows, row_scales = self._copied(weight, scaling)
        out = cupy.empty((num_tokens, weight.shape[0]), result_dtype(scaling))
        scales = row_scales, token_scales
        self._products.multiply(scaling, codes, rows, out, None if scaling is Scaling.INTEGERS else scales)
        return scaling, out, scales

    def _quantise_rows(self, x: Array, code: str, num_rows: int) -> tuple[Array, Array]:
        # Rows after the last hold anything: no other row's sums read them.
        codes, scales = cupy.empty((num_rows, x.shape[1]), np.uint8), cupy.empty(num_rows, np.float32)
        arguments = [x, codes, scales, ctypes.c_int(x.shape[1])]
        if x.size:
            self._rows[code]((len(x), 1, 1), (_ROW_THREADS, 1, 1), arguments, overlap=True)
        return codes, scales

    def _quantise_groups(self, x: Array, num_tokens: int) -> tuple[Array, Array]:
        groups_of_row = x.shape[1] // BLOCK
        codes = cupy.empty((num_tokens, x.shape[1]), np.uint8)
        scales = cupy.empty((groups_of_row, num_tokens), np.float32)
        sizes = ctypes.c_int64(len(x) * groups_of_row), ctypes.c_int(groups_of_row), ctypes.c_int(num_tokens)
        grid = (-(-x.size // (_VALUES * _THREADS)), 1, 1)
        if x.size:
            self._groups(grid, (_THREADS, 1, 1), [x, codes, scales, *sizes], overlap=True)
        return codes, scales

    def _copied(self, weight: TiledWeight, scaling: Scaling) -> tuple[Array, Array]:
        """Codes by rows, and the scales of blocks or rows."""
        (rows, columns), (tile_rows, chunks, tile_bytes) = weight.shape, weight.codes.shape
        codes = cupy.empty((rows, columns), np.uint8)
        pitch = -(-chunks // _PITCH) * _PITCH if scaling is Scaling.BLOCKS else 0
        scales = cupy.empty((rows // BLOCK, pitch) if pitch else rows, np.float32)
        sizes = rows, columns, tile_bytes, weight.scale_rows, pitch
        arguments = [weight.codes, codes, scales, *map(ctypes.c_int, sizes)]
        self._copies[weight.kernels]((chunks, tile_rows, 1), (_THREADS, 1, 1), arguments, overlap=True)
        return codes, scales

    def _scaled(self, epilogue: str, sums: Array, scales: tuple[Array, Array], num_tokens: int) -> Array:
        columns = sums.shape[1] // (2 if epilogue == "swiglu" else 1)
        out = cupy.empty((num_tokens, columns), bfloat16)
        row_scales, token_scales = scales
        grid = (num_tokens, -(-columns // (_VALUES * _THREADS)), 1)
        arguments = [sums, token_scales, row_scales, out, ctypes.c_int(columns)]
        if out.size:
            self._scale[epilogue](grid, (_THREADS, 1, 1), arguments, overlap=True)
        return out


def _group(weight: TiledWeight) -> int | None:
    return group_columns(weight.format, weight.shape, (weight.block_rows, weight.block_columns))


def _scaling(weight: TiledWeight) -> Scaling:
    if weight.format.code is Code.INT8:
        return Scaling.INTEGERS
    return Scaling.ROWS if weight.format.group_columns is None else Scaling.BLOCKS
