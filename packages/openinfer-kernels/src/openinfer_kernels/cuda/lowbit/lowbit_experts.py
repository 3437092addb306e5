"""Products of quantised experts on Hopper: `csrc/lowbit/lowbit_gemm.cuh` with a plan of which tokens each has."""

from collections.abc import Mapping, Sequence

from openinfer_kernels.cuda.common.arrays import address
from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.cuda.common.launch import Kernel
from openinfer_kernels.cuda.common.tensor_maps import TensorMaps
from openinfer_kernels.cuda.gemm import dispatch
from openinfer_kernels.cuda.gemm.grouped_gemm import Epilogue, Plan
from openinfer_kernels.cuda.lowbit.lowbit_gemm import (
    BF16_GROUPS,
    E4M3_THREADS,
    Problem,
    Scaling,
    box_of_tokens,
    has_bf16_groups,
)
from openinfer_kernels.cuda.lowbit.lowbit_partition import SIZES
from openinfer_kernels.cuda.lowbit.lowbit_tiles import TiledWeight
from openinfer_kernels.ops import Array
from openinfer_kernels.weights.gpu_kernels import TILE_COLUMNS
from openinfer_kernels.weights.quantised import Code

_STEM = "lowbit_experts_"
_SUMS: Mapping[int, Sequence[Scaling]] = {8: (Scaling.E4M3, Scaling.SUMS), 32: (Scaling.SUMS,)}
"""By tokens of a tile, where the sums of 128 columns may be scaled: the first may be refused."""
_GROUPS: Mapping[int, Sequence[Scaling]] = {8: (Scaling.E4M3_GROUPS, Scaling.WEIGHTS), 32: (Scaling.WEIGHTS,)}
_MANY = (128, 256)
TILE_TOKENS = (*_SUMS, *_MANY)
"""Of which there are kernels."""
_SIZES = {size.tokens: size for size in SIZES if size.tokens in TILE_TOKENS}
_KERNELS = {"fp8": (_SUMS,), "int4": (_SUMS, _GROUPS), "fp4": (_GROUPS,)}


class LowbitExperts:
    """The products on one device; a code's kernels are loaded when its first weight is."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._maps = TensorMaps()
        self._kernels: dict[tuple[str, Epilogue, Scaling, int], Kernel] = {}

    @staticmethod
    def there_are_some(device: Device) -> bool:
        """Whether the device has the kernels."""
        return device.has(f"{_STEM}fp8")

    def load(self, kernels: str) -> None:
        """Loads all kernels of a code, which are not loaded while a graph is captured."""
        pairs = {(tokens, each) for table in _KERNELS[kernels] for tokens, some in table.items() for each in some}
        pairs |= {(tokens, Scaling.WEIGHTS) for tokens in _MANY}
        if kernels in BF16_GROUPS:
            pairs |= {(tokens, Scaling.BF16_GROUPS) for tokens in TILE_TOKENS}
        for epilogue in Epilogue:
            for tokens, scaling in sorted(pairs):
                key = kernels, epilogue, scaling, tokens
                if key not in self._kernels:
                    name = f"{_STEM}{kernels}_{epilogue}_{scaling}_{tokens}"
                    shared_bytes = _SIZES[tokens].shared_kib << 10
                    self._kernels[key] = self._device.kernel(f"{_STEM}{kernels}", name, shared_bytes=shared_bytes)

    def multiply(
        self,
        x: Array,
        weight: TiledWeight,
        out: Array,
        *,
        epilogue: Epilogue,
        plan: Plan,
        weights_first: bool = True,
        limit: float = float("inf"),
        scaling: Scaling | None = None,
    ) -> None:
        """Writes the products of every position that the plan names, `out [positions, out or out / 2]`.

        Args:
            x: `[positions, in]` BF16, in the plan's order.
            weight: `[matrices, out, in]`, `out` a multiple of 128.
            out: BF16, contiguous.
            epilogue: what is stored.
            plan: which positions each matrix has; its tiles have as many tokens as one of `TILE_TOKENS`.
            weights_first: whether the plan is older than the operator ahead on the stream.
            limit: of the gate.
            scaling: one of `scalings_of`; None: the fastest.
        """
        rows = weight.shape[1]
        size = _SIZES[plan.tile_tokens]
        if scaling is None:
            scaling = _fastest(self.scalings_of(weight, plan.tile_tokens), weight, plan)
        tile_rows, (_, chunks, tile_bytes) = rows // 32, weight.codes.shape
        x_box, has_whole_slots = box_of_tokens(x, size)
        row_tiles = -(-tile_rows // (2 * size.warpgroups))
        problem = Problem(
            tiles=address(weight.codes),
            y=address(out),
            m=len(out),
            n=out.shape[1],
            tile_rows=tile_rows,
            chunks=chunks,
            tile_bytes=tile_bytes,
            groups=weight.groups,
            float16_scales=int(weight.float16_scales),
            scale_rows=weight.scale_rows,
            zeros=weight.zeros,
            bf16_numbers=int(weight.scales_are_bf16),
            multicast_ctas=1,
            splits=1,
            token_tiles=1,
            wide_tiles=row_tiles,
            token_group=1,
            whole_tiles=0,
            plan=address(plan.tiles),
            matrix_bytes=tile_rows * chunks * tile_bytes,
            limit=limit,
            weights_first=int(weights_first),
            whole_slots=int(has_whole_slots),
        )
        threads = size.threads + (E4M3_THREADS if scaling in (Scaling.E4M3, Scaling.E4M3_GROUPS) else 0)
        blocks = min(size.blocks * self._device.num_multiprocessors, len(plan.tiles) * row_tiles)
        kernel = self._kernels[weight.kernels, epilogue, scaling, size.tokens]
        kernel((blocks, 1, 1), (threads, 1, 1), [self._maps.of(x_box), problem], overlap=True, cluster=1)

    def scalings_of(self, weight: TiledWeight, tile_tokens: int) -> Sequence[Scaling]:
        """Those that a kernel has for a weight."""
        usable = (_SUMS if weight.sums_may_be_scaled else _GROUPS).get(tile_tokens, (Scaling.WEIGHTS,))
        if has_bf16_groups(weight):
            usable = (Scaling.BF16_GROUPS, *usable)
        # Codes after the last column are whatever was in memory: as E4M3 they may be NaN, which times zero is NaN.
        has_nan = weight.format.code is Code.E4M3 and weight.shape[2] % TILE_COLUMNS
        return [each for each in usable if not (has_nan and each is Scaling.E4M3)]


def tile_tokens(num_positions: int, num_matrices: int) -> int:
    """Of the tiles that suit so many positions, spread over so many matrices; some then have twice as many."""
    tokens = -(-num_positions // min(num_matrices, num_positions))
    return next((tile for tile, most in dispatch.MOST_EXPERT_TOKENS.items() if tokens <= most), TILE_TOKENS[-1])


def _fastest(scalings: Sequence[Scaling], weight: TiledWeight, plan: Plan) -> Scaling:
    few = plan.expected_tokens <= dispatch.MOST_E4M3_EXPERT_TOKENS.get(weight.kernels, 0)
    return next(each for each in scalings if few or each is not Scaling.E4M3)
