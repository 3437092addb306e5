"""Products of quantised matrices and many tokens on Hopper: `csrc/lowbit/staged_gemm.cuh` dequantises into stages."""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from openinfer_kernels.cuda.common.arrays import address
from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.cuda.common.launch import Kernel
from openinfer_kernels.cuda.common.tensor_maps import TensorBox, TensorMaps
from openinfer_kernels.cuda.gemm.tiles import Epilogue
from openinfer_kernels.cuda.lowbit.lowbit_gemm import BOX_COLUMNS
from openinfer_kernels.cuda.lowbit.lowbit_tiles import TiledWeight
from openinfer_kernels.ops import Array

_STEM = "staged_gemm_"
_BF16_BYTES = 2
_TOKEN_GROUP = 8
"""Token tiles that are multiplied before the next columns: what they read stays in the L2 cache."""
_SHARED_BYTES = 225 << 10
_LARGE_TOKENS = 256
_MULTICAST_CTAS = 2
_MOST_SPLITS = 8
_MOST_KEPT = 4096
_READ_COST = 40
"""Of a row of a chunk, in products: what makes a tile of 256 x 160 better than one of 128 x 96."""
_EXCHANGE_CHUNKS = 3
"""Of K, that could be multiplied while splits add up their sums."""


CODES = ("fp8", "int8", "int4", "int4_min", "fp4", "nvfp4")
"""By the name of kernels: those that have some here."""


class Tile(NamedTuple):
    """Tokens and rows of the weight that a block multiplies at a time: `Sizes` of the kernel."""

    tokens: int
    columns: int

    @property
    def threads(self) -> int:
        return 576 if self.tokens == 192 else 512


TILES = {
    Epilogue.STORE: tuple(
        Tile(tokens, columns) for tokens, columns in ((128, 96), (128, 160), (192, 96), (256, 96), (256, 160))
    ),
    Epilogue.SWIGLU: (Tile(128, 96), Tile(128, 160), Tile(192, 96), Tile(256, 160)),
}
"""All that are compiled, by tokens."""


class Partition(NamedTuple):
    """How a product is divided among blocks."""

    tile: Tile
    token_tiles: int
    wide_tiles: int
    """Along the rows, of multicast CTAs together."""
    multicast_ctas: int
    """Blocks of a cluster that read their tokens together."""
    splits: int
    """Blocks of a cluster that divide K."""
    blocks: int
    """In all clusters."""


class Room(NamedTuple):
    """What runs at a time on a device."""

    multiprocessors: int
    clusters: Callable[[int], int]
    """Clusters of so many blocks, with a multiprocessor for each block."""


class Problem(ctypes.Structure):
    """`staged::Problem`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("tiles", "y")),
        *((name, ctypes.c_int) for name in ("m", "n", "tile_rows", "chunks", "tile_bytes")),
        *((name, ctypes.c_int) for name in ("groups", "float16_scales", "scale_rows", "zeros", "bf16_numbers")),
        *((name, ctypes.c_int) for name in ("multicast_ctas", "splits", "token_tiles", "wide_tiles", "token_group")),
        ("factors", ctypes.c_void_p),
    )


def partitions(epilogue: Epilogue, num_tokens: int, num_rows: int, chunks: int, room: Room) -> Iterator[Partition]:
    """All that are considered, at least one."""
    for tile in TILES[epilogue]:
        token_tiles = -(-num_tokens // tile.tokens)
        for multicast_ctas in (1,) if token_tiles == 1 else (1, _MULTICAST_CTAS):
            wide_tiles = -(-num_rows // (tile.columns * multicast_ctas))
            tiles = token_tiles * wide_tiles
            most = room.clusters(multicast_ctas)
            made = Partition(tile, token_tiles, wide_tiles, multicast_ctas, 1, min(tiles, most) * multicast_ctas)
            yield made
            if multicast_ctas == 1:
                for splits in range(2, min(_MOST_SPLITS, chunks) + 1):
                    if tiles <= room.clusters(splits):
                        yield made._replace(splits=splits, blocks=tiles * splits)


def partition_product(epilogue: Epilogue, num_tokens: int, num_rows: int, chunks: int, room: Room) -> Partition:
    """The partition of a product of T tokens, at least 1, and a weight of so many rows and tiles along K."""
    found = partitions(epilogue, num_tokens, num_rows, chunks, room)
    return min(found, key=lambda partition: _cost(partition, chunks))


def _cost(partition: Partition, chunks: int) -> float:
    """Of the multiprocessor that has most to do, in products of a tile of K and what it reads for them."""
    tile, splits = partition.tile, partition.splits
    rounds = -(-partition.token_tiles * partition.wide_tiles * partition.multicast_ctas * splits // partition.blocks)
    each = -(-chunks // splits) + (_EXCHANGE_CHUNKS if splits > 1 else 0)
    return rounds * each * (tile.tokens * tile.columns + _READ_COST * (tile.tokens + tile.columns))


class StagedGemm:
    """The products on one device."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._maps = TensorMaps()
        self._kernels: dict[tuple[str, Epilogue, Tile], Kernel] = {}
        self._clusters: dict[int, int] = {1: device.num_multiprocessors}
        self._partitions: dict[tuple[Epilogue, int, int, int], Partition] = {}
        self._room = Room(device.num_multiprocessors, self._clusters_of)

    def load(self, kernels: str) -> None:
        """Loads all kernels of a code, which are not loaded while a graph is captured; none where it has none."""
        if kernels not in CODES:
            return
        for epilogue, tiles in TILES.items():
            for tile in tiles:
                key = kernels, epilogue, tile
                if key not in self._kernels:
                    name = f"{_STEM}{kernels}_{epilogue}_{tile.tokens}x{tile.columns}"
                    self._kernels[key] = self._device.kernel(f"{_STEM}{kernels}", name, shared_bytes=_SHARED_BYTES)

    def multiply(
        self,
        x: Array,
        weight: TiledWeight,
        out: Array,
        *,
        epilogue: Epilogue,
        partition: Partition | None = None,
    ) -> None:
        """Writes `x [T, k] @ weight.T` into `out [T, n]`, for `SWIGLU` its gated halves into `out [T, n / 2]`, in BF16.

        Its kernels were loaded. Arrays are contiguous and begin at multiples of 16 bytes; T at least 1, n a multiple of
        8. `partition` is one of `partitions_of`; None: that of least cost.
        """
        num_tokens, k = x.shape
        chosen = self.partition_of(epilogue, num_tokens, weight) if partition is None else partition
        problem = Problem(
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
            None if weight.factors is None else address(weight.factors),
        )
        tile = chosen.tile
        # The map ends at the last token and column, and the copy engine fills up with zeros.
        box = (BOX_COLUMNS, tile.tokens // chosen.multicast_ctas)
        x_map = self._maps.of(TensorBox(address(x), (k, num_tokens), (k * _BF16_BYTES,), box))
        kernel = self._kernels[weight.kernels, epilogue, tile]
        cluster = chosen.multicast_ctas * chosen.splits
        kernel((chosen.blocks, 1, 1), (tile.threads, 1, 1), [x_map, problem], overlap=True, cluster=cluster)

    def partitions_of(self, epilogue: Epilogue, num_tokens: int, weight: TiledWeight) -> Sequence[Partition]:
        """All ways to divide a product that are considered, for measurements."""
        return list(partitions(epilogue, num_tokens, weight.shape[0], weight.num_chunks, self._room))

    def partition_of(self, epilogue: Epilogue, num_tokens: int, weight: TiledWeight) -> Partition:
        """The one of least cost."""
        key = epilogue, num_tokens, weight.shape[0], weight.num_chunks
        if key not in self._partitions:
            # Prompts have any length: without an end the table would grow as long as the process lives.
            if len(self._partitions) >= _MOST_KEPT:
                self._partitions.clear()
            self._partitions[key] = partition_product(*key, self._room)
        return self._partitions[key]

    def _clusters_of(self, blocks: int) -> int:
        # The driver is asked, as groups of multiprocessors differ in size: fewer clusters run than blocks suggest.
        if blocks not in self._clusters:
            (_, _, tile), kernel = next(iter(self._kernels.items()))
            self._clusters[blocks] = kernel.most_clusters(blocks, threads=tile.threads)
        return self._clusters[blocks]
