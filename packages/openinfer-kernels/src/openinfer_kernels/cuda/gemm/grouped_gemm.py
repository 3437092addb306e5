"""Products of several matrices, each with its own tokens or its slice of each: `csrc/gemm/grouped_gemm.cuh`."""

import ctypes
from dataclasses import dataclass
from enum import StrEnum

from openinfer_kernels.cuda.common.arrays import address
from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.cuda.common.launch import Kernel
from openinfer_kernels.errors import ArrayMismatchError
from openinfer_kernels.ops import Array, LinearWeight, QuantisedWeight
from openinfer_kernels.weights.gpu_kernels import rows_kernels
from openinfer_kernels.weights.quantised import WeightFormat

_THREADS = 128
_FEW_BLOCKS = 2
"""Of each multiprocessor: with fewer, tiles of fewer rows are faster."""
_BF16_BYTES = 2
BF16 = "bf16"
NAMES = ("fp8", "int4", "fp4")
"""Of the sources and kernels of quantised weights."""
TILE_TOKENS = (8, 32, 128)
"""Tokens of a tile, of which each kernel has one."""
_MOST_TOKENS = {8: 8, 32: 40}
"""Of a matrix, for the smaller tiles: beyond, the next one is faster; see docs/notes/kernels.md."""


_FEW = "few"
"""The kernel of few rows: of 8 tokens as well."""


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Of a kernel, as in `GROUPED_GEMM` of its source."""

    rows: int
    tokens: int
    warp_columns: int
    units: int
    stages: int


_SIZES = {
    "bf16": {
        _FEW: _Sizes(16, 8, 4, 2, 5),
        8: _Sizes(64, 8, 1, 2, 7),
        32: _Sizes(64, 32, 1, 2, 6),
        128: _Sizes(128, 128, 1, 2, 3),
    },
    "fp8": {
        _FEW: _Sizes(16, 8, 4, 2, 3),
        8: _Sizes(64, 8, 1, 2, 5),
        32: _Sizes(64, 32, 1, 2, 4),
        128: _Sizes(128, 128, 1, 1, 3),
    },
    "int4": {
        _FEW: _Sizes(16, 8, 4, 1, 4),
        8: _Sizes(64, 8, 1, 2, 4),
        32: _Sizes(64, 32, 1, 2, 3),
        128: _Sizes(128, 128, 1, 1, 2),
    },
}
_SIZES["fp4"] = _SIZES["int4"]
_PARTS = {"bf16": 1, "fp8": 2, "int4": 4, "fp4": 4}
"""Of eight values, in 16 bytes of codes."""
_SCALE_BYTES = {"bf16": 0, "fp8": 4, "int4": 2, "fp4": 1}


def kernels_of(weight: LinearWeight) -> str:
    """The name of the sources and kernels that multiply a weight; see `kernels_of_format`."""
    return kernels_of_format(weight.format) if isinstance(weight, QuantisedWeight) else BF16


def kernels_of_format(weight_format: WeightFormat) -> str:
    """The name of the sources and kernels of a format.

    Raises:
        ArrayMismatchError: there are none.
    """
    found = rows_kernels(weight_format)
    if found is None:
        raise ArrayMismatchError(f"weights of {weight_format} have no kernel on a GPU that multiplies rows of codes")
    return found


class Epilogue(StrEnum):
    """What becomes of the sums."""

    STORE = "store"
    SWIGLU = "swiglu"
    """`silu(gate) * up` of the upper and lower half of the rows, which halves the features."""


class _Problem(ctypes.Structure):
    """`grouped::Problem`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("codes", "scales", "x", "y", "tiles", "sorted_tokens")),
        *((name, ctypes.c_int) for name in ("rows", "k", "row_bytes", "scale_rows", "scale_pitch", "num_positions")),
        ("weights_first", ctypes.c_int),
        ("limit", ctypes.c_float),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Which tokens each expert multiplies: of `plan_experts`."""

    tiles: Array
    """`[most tiles, 4]` int32: expert, first sorted position, positions."""
    sorted_tokens: Array
    """`[T k]` int32: the token of each position."""
    positions: Array
    """`[T k]` int32: where each choice of each token stands, -1 where its expert is on another rank."""
    tile_tokens: int
    expected_tiles: int
    """That have tokens, where each expert is as likely as any other."""
    expected_tokens: int
    """Of an expert that has some, likewise."""


class GroupedGemm:
    """The products on one device; a format's kernels are loaded when it is first used."""

    def __init__(self, device: Device, *, tile_tokens: int | None = None) -> None:
        """`tile_tokens`: of every tile, one of `TILE_TOKENS`; None chooses by how many tokens there are."""
        self._device = device
        self._tile_tokens = tile_tokens
        self._few_blocks = _FEW_BLOCKS * device.num_multiprocessors
        self._kernels: dict[str, dict[tuple[Epilogue, int | str], Kernel]] = {}

    @property
    def chooses(self) -> bool:
        """Whether what is done depends on how many tokens there are."""
        return self._tile_tokens is None

    def multiply(
        self,
        x: Array,
        weight: LinearWeight,
        out: Array,
        *,
        epilogue: Epilogue,
        plan: Plan | None = None,
        sorted_tokens: Array | None = None,
        tile_tokens: int | None = None,
        weights_first: bool = True,
        limit: float = float("inf"),
    ) -> None:
        """Writes the products of every position, `out [positions, out or out / 2]`.

        Without a plan each matrix has its piece of every position: `x [positions, matrices in]` and
        `out [positions, matrices out]`.

        Args:
            x: `[.., in]` BF16.
            weight: `[matrices, out, in]`, or one, `[out, in]`.
            out: BF16, contiguous; positions that the plan does not name stay as they are.
            epilogue: what is stored.
            plan: which positions each matrix has.
            sorted_tokens: the row of `x` of each position; None: its own.
            tile_tokens: of every tile without a plan, where this object chooses; None chooses by how many there are.
            weights_first: whether the plan is older than the operator ahead on the stream, so that weights may be
                read while that still runs.
            limit: of the gate.
        """
        rows, k = weight.shape[-2:]
        name = kernels_of(weight)
        if plan is not None:
            tokens = plan.tile_tokens
        elif tile_tokens is None or not self.chooses:
            tokens = self.tile_tokens(len(out), 1)
        else:
            tokens = tile_tokens
        num_pieces = weight.shape[0] if plan is None and len(weight.shape) == 3 else 1
        quantised = isinstance(weight, QuantisedWeight)
        problem = _Problem(
            address(weight.codes if quantised else weight),
            address(weight.scales) if quantised else None,
            address(x),
            address(out),
            None if plan is None else address(plan.tiles),
            None if sorted_tokens is None else address(sorted_tokens),
            rows,
            k,
            weight.codes.shape[-1] if quantised else _BF16_BYTES * k,
            weight.block_rows if quantised else 1,
            weight.scales.strides[-2] if quantised else 0,
            len(out),
            int(weights_first),
            limit,
        )
        num_tiles = -(-len(out) // tokens) if plan is None else len(plan.tiles)
        expected_tiles = num_tiles if plan is None else plan.expected_tiles
        size = self._size(name, tokens, rows * expected_tiles * num_pieces)
        grid = (-(-rows // _SIZES[name][size].rows), num_tiles, num_pieces)
        self._kernel(name, epilogue, size)(grid, (_THREADS, 1, 1), [problem], overlap=True)

    def _size(self, name: str, tokens: int, num_rows: int) -> int | str:
        """Which kernel takes tiles of so many tokens: that of few rows where the others leave the device idle."""
        smallest = TILE_TOKENS[0]
        is_few = num_rows < self._few_blocks * _SIZES[name][smallest].rows
        return _FEW if tokens == smallest and self.chooses and is_few else tokens

    def tile_tokens(self, num_positions: int, num_matrices: int) -> int:
        """Of the tiles that suit so many positions, spread over so many matrices; some then have twice as many."""
        if self._tile_tokens is not None:
            return self._tile_tokens
        tokens = -(-num_positions // min(num_matrices, num_positions))
        return next((tile for tile, most in _MOST_TOKENS.items() if tokens <= most), TILE_TOKENS[-1])

    def _kernel(self, name: str, epilogue: Epilogue, size: int | str) -> Kernel:
        if name not in self._kernels:
            self._kernels[name] = {
                (each, one): self._device.kernel(
                    f"grouped_gemm_{name}",
                    f"grouped_gemm_{name}_{each}_{one}",
                    shared_bytes=_shared_bytes(name, sizes),
                )
                for each in Epilogue
                for one, sizes in _SIZES[name].items()
            }
        return self._kernels[name][epilogue, size]


def _shared_bytes(name: str, size: _Sizes) -> int:
    """`Shape::kSharedBytes`."""
    columns = 32 * size.units * _PARTS[name] * size.warp_columns
    row_bytes = 64 * size.units * size.warp_columns + columns // 32 * _SCALE_BYTES[name]
    return size.stages * (size.rows * row_bytes + size.tokens * columns * _BF16_BYTES) + 4 * size.tokens
