"""Products of quantised matrices on Hopper: `csrc/lowbit/lowbit_gemm.cuh` dequantises codes in registers."""

import ctypes
from collections.abc import Sequence
from enum import StrEnum
from itertools import product

from openinfer_kernels.cuda.common.arrays import address
from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.cuda.common.launch import Kernel
from openinfer_kernels.cuda.common.tensor_maps import TensorBox, TensorMaps
from openinfer_kernels.cuda.gemm import dispatch
from openinfer_kernels.cuda.gemm.tiles import Epilogue
from openinfer_kernels.cuda.lowbit.lowbit_partition import (
    MOST_TOKENS_OF_SUMS,
    SIZES,
    Partition,
    Room,
    Size,
    partition_product,
    partitions,
)
from openinfer_kernels.cuda.lowbit.lowbit_tiles import TiledWeight
from openinfer_kernels.ops import Array
from openinfer_kernels.weights.gpu_kernels import TILE_COLUMNS
from openinfer_kernels.weights.quantised import Code

_STEM = "lowbit_gemm_"
_BF16_BYTES = 2
BOX_COLUMNS = 64
_TOKEN_GROUP = 8
"""Token tiles that are multiplied before the next rows: what they read stays in the L2 cache."""
_MOST_KEPT = 4096
_WEIGHTS_ALONE = ("int4_min", "nvfp4")
"""Kernels that never scale sums of 128 columns: a minimum is no multiple of a scale, and these of NVFP4 have eight."""
_E4M3_TOKENS = (8, 16)
"""Of kernels that multiply codes as E4M3."""
BF16_GROUPS = ("int4",)
"""Kernels that have some for groups with BF16 scales besides: those of `fp4` and `nvfp4` always have such groups."""
_WOVEN = ("int4", 128)
"""Kernels and tokens of the tile where it was found to be quicker, for scales that are no BF16 numbers."""
E4M3_THREADS = 128
"""More than in others: four warps split activations."""


class Scaling(StrEnum):
    """What is multiplied and what is scaled, as in the names of the kernels."""

    SUMS = "sums"
    """Codes in BF16; the sums of 128 columns are scaled."""
    E4M3 = "e4m3"
    """The same in E4M3, with activations as two such numbers each."""
    E4M3_GROUPS = "e4m3groups"
    """The same, and the sums of 32 columns are scaled."""
    BF16_GROUPS = "bf16groups"
    """Weights that were scaled and rounded to BF16, of groups within a tile whose scales are BF16 and whose zero points
    are all the middle."""
    WOVEN = "woven"
    """The same of any scales and zero points, one group to a tile: some of the next columns after each product."""
    WEIGHTS = "weights"
    """The same of any groups, all of the next columns between products."""


class Problem(ctypes.Structure):
    """`lowbit::Problem`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("tiles", "y")),
        *((name, ctypes.c_int) for name in ("m", "n", "tile_rows", "chunks", "tile_bytes")),
        *((name, ctypes.c_int) for name in ("groups", "float16_scales", "scale_rows", "zeros", "bf16_numbers")),
        *((name, ctypes.c_int) for name in ("multicast_ctas", "splits", "token_tiles", "wide_tiles", "token_group")),
        ("whole_tiles", ctypes.c_int),
        ("plan", ctypes.c_void_p),
        ("matrix_bytes", ctypes.c_int64),
        ("limit", ctypes.c_float),
        ("weights_first", ctypes.c_int),
        ("whole_slots", ctypes.c_int),
    )


class ProblemWithFactors(Problem):
    """`lowbit::ProblemWithFactors`."""

    _fields_ = (("factors", ctypes.c_void_p),)


class LowbitGemm:
    """The products on one device."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._maps = TensorMaps()
        self._kernels: dict[tuple[str, Epilogue, Scaling, int], Kernel] = {}
        self._some: dict[int, Kernel] = {}  # by its tokens: clusters of all codes are alike
        self._clusters: dict[tuple[int, int], int] = {}
        self._partitions: dict[tuple[int, int, int], Partition] = {}
        self._room = Room(device.num_multiprocessors, self._clusters_of)

    @staticmethod
    def there_is_one(device: Device) -> bool:
        """Whether the device has the kernels."""
        return device.has(f"{_STEM}fp8")

    def load(self, kernels: str, epilogues: Sequence[Epilogue] = (Epilogue.STORE, Epilogue.SWIGLU)) -> None:
        """Loads all kernels of a code, which are not loaded while a graph is captured."""
        for epilogue, size, scaling in product(epilogues, SIZES, Scaling):
            key = kernels, epilogue, scaling, size.tokens
            if key in self._kernels or not _has(kernels, scaling, size):
                continue
            name = f"{_STEM}{kernels}_{epilogue}_{scaling}_{size.tokens}"
            stem = f"{_STEM}{kernels}" + ("_head" if epilogue is Epilogue.FLOAT32 else "")
            self._kernels[key] = self._device.kernel(stem, name, shared_bytes=size.shared_kib << 10)
            self._some.setdefault(size.tokens, self._kernels[key])

    def multiply(
        self,
        x: Array,
        weight: TiledWeight,
        out: Array,
        *,
        epilogue: Epilogue,
        scaling: Scaling | None = None,
        partition: Partition | None = None,
    ) -> None:
        """Writes `x [T, k] @ weight.T` into `out [T, n]`, for `SWIGLU` its gated halves into `out [T, n / 2]`.

        `out` is float32 for `FLOAT32`, else BF16.

        Its kernels were loaded. Arrays are contiguous and begin at multiples of 16 bytes; T at least 1. `SWIGLU` takes
        halves of multiples of 64 rows. `scaling` is one of `scalings_of`; None: the fastest. `partition` is one of
        `partitions_of`; None: that of least cost.
        """
        num_tokens = len(x)
        chosen = self.partition_of(num_tokens, weight) if partition is None else partition
        size = chosen.size
        scaling = _fastest(num_tokens, weight, self.scalings_of(weight, size)) if scaling is None else scaling
        problem = (Problem if weight.factors is None else ProblemWithFactors)(
            address(weight.codes),
            address(out),
            num_tokens,
            out.shape[1],
            *weight.codes.shape,
            weight.groups,
            int(weight.float16_scales),
            weight.scale_rows,
            weight.zeros,
            int(weight.scales_are_bf16),
            chosen.multicast_ctas,
            chosen.splits,
            chosen.token_tiles,
            chosen.wide_tiles,
            _TOKEN_GROUP,
            chosen.whole_tiles,
        )
        if isinstance(problem, ProblemWithFactors):
            problem.factors = address(weight.factors)
        x_box, problem.whole_slots = box_of_tokens(x, size, chosen.multicast_ctas)
        x_map = self._maps.of(x_box)
        kernel = self._kernels[weight.kernels, epilogue, scaling, size.tokens]
        cluster = max(chosen.splits, chosen.multicast_ctas)
        threads = size.threads + (E4M3_THREADS if scaling in (Scaling.E4M3, Scaling.E4M3_GROUPS) else 0)
        kernel((chosen.blocks, 1, 1), (threads, 1, 1), [x_map, problem], overlap=True, cluster=cluster)

    def scalings_of(self, weight: TiledWeight, size: Size) -> Sequence[Scaling]:
        """Those that a kernel has for a matrix."""
        usable = (Scaling.E4M3, Scaling.SUMS) if weight.sums_may_be_scaled else (Scaling.E4M3_GROUPS,)
        # Codes after the last column are whatever was in memory: as E4M3 they may be NaN, which times zero is NaN.
        if weight.format.code is Code.E4M3 and weight.shape[1] % TILE_COLUMNS:
            usable = usable[1:]
        if has_bf16_groups(weight):
            usable = (Scaling.BF16_GROUPS, *usable)
        if weight.groups == 1 and not weight.scales_are_bf16:
            usable = (*usable, Scaling.WOVEN)
        return [scaling for scaling in (*usable, Scaling.WEIGHTS) if _has(weight.kernels, scaling, size)]

    def partitions_of(self, num_tokens: int, weight: TiledWeight) -> Sequence[Partition]:
        """All ways to divide a product that are considered, for measurements."""
        return partitions(num_tokens, weight.codes.shape[0], weight.num_chunks, self._room)

    def partition_of(self, num_tokens: int, weight: TiledWeight) -> Partition:
        """The one of least cost."""
        key = num_tokens, weight.codes.shape[0], weight.num_chunks
        if key not in self._partitions:
            # Prompts have any length: without an end the table would grow as long as the process lives.
            if len(self._partitions) >= _MOST_KEPT:
                self._partitions.clear()
            self._partitions[key] = partition_product(*key, self._room)
        return self._partitions[key]

    def _clusters_of(self, size: Size, blocks: int) -> int:
        # The driver is asked, as groups of multiprocessors differ in size: fewer clusters run than blocks suggest.
        key = size.tokens, blocks
        if key not in self._clusters:
            self._clusters[key] = self._some[size.tokens].most_clusters(blocks, threads=size.threads)
        return self._clusters[key]


def has_bf16_groups(weight: TiledWeight) -> bool:
    """Whether `Scaling.BF16_GROUPS` may scale a weight."""
    is_one = weight.kernels in BF16_GROUPS and weight.groups > 1
    return is_one and weight.scales_are_bf16 and not weight.zeros


def box_of_tokens(x: Array, size: Size, multicast_ctas: int = 1) -> tuple[TensorBox, bool]:
    """What a copy of activations brings, and whether it is a whole slot: that wants columns in whole boxes.

    The map ends at the last token and column, and the copy engine fills up with zeros.
    """
    num_tokens, k = x.shape
    row_bytes = k * _BF16_BYTES
    if size.boxes > 1 and k % BOX_COLUMNS == 0:
        sizes = (BOX_COLUMNS, num_tokens, k // BOX_COLUMNS, 1)
        strides = (row_bytes, BOX_COLUMNS * _BF16_BYTES, num_tokens * row_bytes)
        return TensorBox(address(x), sizes, strides, (BOX_COLUMNS, size.tokens, size.boxes, 1)), True
    box = (BOX_COLUMNS, size.tokens // multicast_ctas)
    return TensorBox(address(x), (k, num_tokens), (row_bytes,), box), False


def _fastest(num_tokens: int, weight: TiledWeight, scalings: Sequence[Scaling]) -> Scaling:
    most = {
        Scaling.E4M3: dispatch.MOST_E4M3_TOKENS.get(weight.kernels, 0),
        Scaling.E4M3_GROUPS: dispatch.MOST_E4M3_GROUPS_TOKENS.get(weight.kernels, 0),
    }
    return next(scaling for scaling in scalings if num_tokens <= most.get(scaling, num_tokens))


def _has(kernels: str, scaling: Scaling, size: Size) -> bool:
    match scaling:
        case Scaling.SUMS:
            return size.tokens <= MOST_TOKENS_OF_SUMS and kernels not in _WEIGHTS_ALONE
        case Scaling.E4M3:
            return size.tokens in _E4M3_TOKENS and kernels in dispatch.MOST_E4M3_TOKENS
        case Scaling.E4M3_GROUPS:
            return size.tokens in _E4M3_TOKENS and kernels in dispatch.MOST_E4M3_GROUPS_TOKENS
        case Scaling.BF16_GROUPS:
            return kernels in BF16_GROUPS
        case Scaling.WOVEN:
            return (kernels, size.tokens) == _WOVEN
        case Scaling.WEIGHTS:
            return True
