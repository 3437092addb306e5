"""Products of several matrices, each with its own tokens: `csrc/grouped_gemm.cuh`, for weights of every format."""

import ctypes
from dataclasses import dataclass
from enum import StrEnum

from openinfer_kernels.cuda.arrays import address
from openinfer_kernels.cuda.device import Device
from openinfer_kernels.cuda.launch import Kernel
from openinfer_kernels.ops import Array, QuantisedWeight, Weight
from openinfer_kernels.quantised_parts import WeightFormat

_THREADS = 128
_BF16_BYTES = 2
_BF16 = "bf16"
NAMES = {
    None: _BF16,
    WeightFormat.FP8_BLOCKS: "fp8",
    WeightFormat.INT4_GROUPS: "int4",
    WeightFormat.FP4_GROUPS: "fp4",
}
"""Of the sources and kernels, by format; None is BF16."""
TILE_TOKENS = (8, 32, 128)
"""Tokens of a tile, of which each kernel has one."""
_MOST_TOKENS = {8: 8, 32: 40}
"""Of a matrix, for the smaller tiles: beyond, the next one is faster; see docs/kernels.md."""


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Of a kernel, as in `GROUPED_GEMM` of its source."""

    rows: int
    units: int
    stages: int


_SIZES = {
    "bf16": {8: _Sizes(64, 2, 7), 32: _Sizes(64, 2, 6), 128: _Sizes(128, 2, 3)},
    "fp8": {8: _Sizes(64, 2, 5), 32: _Sizes(64, 2, 4), 128: _Sizes(128, 1, 3)},
    "int4": {8: _Sizes(64, 2, 4), 32: _Sizes(64, 2, 3), 128: _Sizes(128, 1, 2)},
    "fp4": {8: _Sizes(64, 2, 4), 32: _Sizes(64, 2, 3), 128: _Sizes(128, 1, 2)},
}
_PARTS = {"bf16": 1, "fp8": 2, "int4": 4, "fp4": 4}
"""Of eight values, in 16 bytes of codes."""
_SCALE_BYTES = {"bf16": 0, "fp8": 4, "int4": 2, "fp4": 1}


class Epilogue(StrEnum):
    """What becomes of the sums."""

    STORE = "store"
    SWIGLU = "swiglu"
    """`silu(gate) * up` of the upper and lower half of the rows, which halves the features."""


class _Problem(ctypes.Structure):
    """`grouped::Problem`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("codes", "scales", "x", "y", "tiles", "line")),
        *((name, ctypes.c_int) for name in ("rows", "k", "row_bytes", "scale_rows", "scale_pitch", "num_positions")),
        ("weights_first", ctypes.c_int),
        ("limit", ctypes.c_float),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Which tokens each expert multiplies: of `plan_experts`."""

    tiles: Array
    """`[most tiles, 4]` int32: expert, first position in the line, positions."""
    line: Array
    """`[T k]` int32: the token of each position."""
    positions: Array
    """`[T k]` int32: where each choice of each token stands, -1 where its expert is on another rank."""
    tile_tokens: int


class GroupedGemm:
    """The products on one device; a format's kernels are loaded when it is first used."""

    def __init__(self, device: Device, *, tile_tokens: int | None = None) -> None:
        """`tile_tokens`: of every tile, one of `TILE_TOKENS`; None chooses by how many tokens there are."""
        self._device = device
        self._tile_tokens = tile_tokens
        self._kernels: dict[str, dict[tuple[Epilogue, int], Kernel]] = {}

    @property
    def chooses(self) -> bool:
        """Whether what is done depends on how many tokens there are."""
        return self._tile_tokens is None

    def multiply(
        self,
        x: Array,
        weight: Weight,
        out: Array,
        *,
        epilogue: Epilogue,
        plan: Plan | None = None,
        line: Array | None = None,
        weights_first: bool = True,
        limit: float = float("inf"),
    ) -> None:
        """Writes the products of every position, `out [positions, out or out / 2]`.

        Args:
            x: `[.., in]` BF16.
            weight: `[matrices, out, in]`, or `[out, in]` without a plan.
            out: BF16, contiguous; positions that the plan does not name stay as they are.
            epilogue: what is stored.
            plan: which positions each matrix has; None: all of them the only one.
            line: the row of `x` of each position; None: its own.
            weights_first: whether the plan is older than the operator ahead on the stream, so that weights may be
                read while that still runs.
            limit: of the gate.
        """
        rows, k = weight.shape[-2:]
        name = NAMES[weight.format if isinstance(weight, QuantisedWeight) else None]
        tokens = self.tile_tokens(len(out), 1) if plan is None else plan.tile_tokens
        size = _SIZES[name][tokens]
        quantised = isinstance(weight, QuantisedWeight)
        problem = _Problem(
            address(weight.codes if quantised else weight),
            address(weight.scales) if quantised else None,
            address(x),
            address(out),
            None if plan is None else address(plan.tiles),
            None if line is None else address(line),
            rows,
            k,
            weight.codes.shape[-1] if quantised else _BF16_BYTES * k,
            weight.block_rows if quantised else 1,
            weight.scales.strides[-2] if quantised else 0,
            len(out),
            int(weights_first),
            limit,
        )
        features = out.shape[1]
        tile_features = size.rows // 2 if epilogue is Epilogue.SWIGLU else size.rows
        num_tiles = -(-len(out) // tokens) if plan is None else len(plan.tiles)
        kernel = self._kernel(name, epilogue, tokens)
        kernel((-(-features // tile_features), num_tiles, 1), (_THREADS, 1, 1), [problem], overlap=True)

    def tile_tokens(self, num_positions: int, num_matrices: int) -> int:
        """Of the tiles that suit so many positions, spread over so many matrices; some then have twice as many."""
        if self._tile_tokens is not None:
            return self._tile_tokens
        tokens = -(-num_positions // min(num_matrices, num_positions))
        return next((tile for tile, most in _MOST_TOKENS.items() if tokens <= most), TILE_TOKENS[-1])

    def _kernel(self, name: str, epilogue: Epilogue, tokens: int) -> Kernel:
        if name not in self._kernels:
            self._kernels[name] = {
                (each, size): self._device.kernel(
                    f"grouped_gemm_{name}",
                    f"grouped_gemm_{name}_{each}_{size}",
                    shared_bytes=_shared_bytes(name, size),
                )
                for each in Epilogue
                for size in TILE_TOKENS
            }
        return self._kernels[name][epilogue, tokens]


def _shared_bytes(name: str, tokens: int) -> int:
    """`Shape::kSharedBytes`."""
    size = _SIZES[name][tokens]
    columns = 32 * size.units * _PARTS[name]
    stage = size.rows * (64 * size.units + columns // 32 * _SCALE_BYTES[name]) + tokens * columns * 2
    return size.stages * stage + 4 * tokens
