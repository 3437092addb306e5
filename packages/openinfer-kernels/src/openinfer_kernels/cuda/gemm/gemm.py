"""Products of more tokens than `decode_gemm` serves: `csrc/gemm/gemm.cu` and its epilogues. Hopper only."""

import ctypes
from collections.abc import Mapping
from typing import NamedTuple

from openinfer_kernels.cuda.common.arrays import address, fits_vectors
from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.cuda.common.launch import Kernel
from openinfer_kernels.cuda.common.tensor_maps import TensorBox, TensorMap, TensorMaps
from openinfer_kernels.cuda.gemm.tiles import (
    CHUNK,
    LARGE_TOKENS,
    PROMPT_TILES,
    SHARED_BYTES,
    TILES,
    TILES_BESIDE,
    AdaptedPartition,
    Epilogue,
    Partition,
    PartsPartition,
    Room,
    Tile,
    has_room_beside,
    partition_adapted,
    partition_gates_beside,
    partition_in_parts,
    partition_product,
    partition_prompt,
)
from openinfer_kernels.ops import Array

_STEM, _ADAPTED_STEM, _ONE_TILE_STEM = "gemm", "adapted_gemm", "adapted_gemm_one_tile"
_BESIDE_STEM, _PROMPT_STEM = "gemm_beside_adapters", "prompt_gemm"
_BF16_BYTES = 2
_MOST_KEPT = 4096
_Tiles = Mapping[Epilogue, tuple[Tile, ...]]
_GROUP = 8
"""Token tiles that are multiplied before the next columns: what they read stays in the L2 cache."""


class Gemm:
    """The products on one device; on GPUs other than Hopper it serves none."""

    def __init__(self, device: Device) -> None:
        self._room = Room(device.num_multiprocessors, self._clusters_of)
        self._device = device
        self._kernels = _kernels(device)
        self._adapted: dict[str, dict[tuple[Epilogue, Tile], Kernel]] = {}
        self._most_clusters = {1: device.num_multiprocessors}
        self._adapted_partitions: dict[tuple[Epilogue, int, int, int, int], AdaptedPartition] = {}
        self._parts_partitions: dict[tuple[Epilogue, int, int, int, int], PartsPartition | None] = {}
        self._partitions: dict[tuple[Epilogue, int, int, int], Partition | None] = {}
        self._maps = TensorMaps()

    def serves(self, epilogue: Epilogue, x: Array, weight: Array) -> bool:
        """Whether it multiplies `x [T, k]` and `weight [n, k]`, and is the faster one for that."""
        n, k = weight.shape
        whole = n % 16 == 0 and k % 8 == 0 and n > 0 and k > 0 and len(x) > 0
        if not whole or not self._kernels or not fits_vectors(x, weight):
            return False
        return self._partition_of(epilogue, x, weight) is not None

    def linear(self, x: Array, weight: Array, out: Array, *, weights_first: bool = True) -> None:
        partition = self._partition(Epilogue.STORE, x, weight)
        self.multiply(Epilogue.STORE, partition, x, weight, out, weights_first=weights_first)

    def linear_float32(self, x: Array, weight: Array, out: Array) -> None:
        self.multiply(Epilogue.FLOAT32, self._partition(Epilogue.FLOAT32, x, weight), x, weight, out)

    def linear_swiglu(self, x: Array, gate_up: Array, out: Array, *, weights_first: bool = True) -> None:
        partition = self._partition(Epilogue.SWIGLU, x, gate_up)
        self.multiply(Epilogue.SWIGLU, partition, x, gate_up, out, weights_first=weights_first)

    def adapted_partition(
        self, epilogue: Epilogue, num_tokens: int, rows: int, columns: int, *, shrink_rows: int
    ) -> AdaptedPartition:
        """Of `multiply_adapted`, also where cuBLASLt is faster without adapters; without `rows`, of `shrink`."""
        key = epilogue, num_tokens, rows, columns, shrink_rows
        if key not in self._adapted_partitions:
            if len(self._adapted_partitions) >= _MOST_KEPT:
                self._adapted_partitions.clear()
            found = partition_adapted(epilogue, num_tokens, rows, columns, self._room, shrink_rows=shrink_rows)
            self._adapted_partitions[key] = found
        return self._adapted_partitions[key]

    def parts_partition(
        self, epilogue: Epilogue, num_tokens: int, rows: int, columns: int, *, shrink_rows: int
    ) -> PartsPartition | None:
        """Of `multiply_in_parts`; None for more tokens than it serves."""
        key = epilogue, num_tokens, rows, columns, shrink_rows
        if key not in self._parts_partitions:
            if len(self._parts_partitions) >= _MOST_KEPT:
                self._parts_partitions.clear()
            found = partition_in_parts(epilogue, num_tokens, rows, columns, self._room, shrink_rows=shrink_rows)
            self._parts_partitions[key] = found
        return self._parts_partitions[key]

    def multiply_in_parts(
        self,
        epilogue: Epilogue,
        partition: PartsPartition,
        x: Array,
        weight: Array,
        out: Array,
        *,
        adapters: ctypes.Structure,
        shrink_tiles: int,
    ) -> None:
        """As `multiply_adapted`, of few tokens, with A x in parts."""
        kernel = self._adapted_kernel(epilogue, partition.partition.tile, stem=_ONE_TILE_STEM)
        product = _Product(epilogue, partition.partition, kernel, shrink_tiles * partition.parts)
        self._multiply(product, x, weight, out, adapters)

    def multiply_adapted(
        self,
        epilogue: Epilogue,
        partition: Partition,
        x: Array,
        weight: Array,
        out: Array,
        *,
        adapters: ctypes.Structure,
        shrink_tiles: int,
    ) -> None:
        """A product with `AdapterMaps`, whose boxes are those of the partition, and the same `shrink_tiles`."""
        product = _Product(epilogue, partition, self._adapted_kernel(epilogue, partition.tile), shrink_tiles)
        self._multiply(product, x, weight, out, adapters)

    def prompt_partition(self, epilogue: Epilogue, num_tokens: int, rows: int) -> Partition:
        """Of `multiply_prompt`."""
        return partition_prompt(epilogue, num_tokens, rows, self._room)

    def multiply_prompt(
        self,
        epilogue: Epilogue,
        partition: Partition,
        x: Array,
        weight: Array,
        out: Array,
        *,
        adapters: ctypes.Structure,
    ) -> None:
        """As `multiply_adapted`, where a launch ahead has made A x and has said which steps of it are needed."""
        kernel = self._adapted_kernel(epilogue, partition.tile, stem=_PROMPT_STEM)
        self._multiply(_Product(epilogue, partition, kernel, 0), x, weight, out, adapters)

    def partition_beside(self, x: Array, weight: Array, *, shrink_rows: int) -> Partition | None:
        """That of `linear`; None where it does not serve them, or has no room for as many rows of A."""
        if not self.serves(Epilogue.STORE, x, weight):
            return None
        partition = self._partition(Epilogue.STORE, x, weight)
        return partition if has_room_beside(partition, len(weight), self._room, shrink_rows=shrink_rows) else None

    def partition_gates_beside(self, x: Array, gate_up: Array, *, shrink_rows: int) -> Partition | None:
        """Of gate and up as a product of `Epilogue.STORE`, with the sums that `linear_swiglu` has; None where this does
        not serve them, or there is no room for as many rows of A.
        """
        if not self.serves(Epilogue.SWIGLU, x, gate_up):
            return None
        return partition_gates_beside(len(gate_up), self._room, shrink_rows=shrink_rows)

    def multiply_beside(
        self,
        partition: Partition,
        x: Array,
        weight: Array,
        out: Array,
        *,
        adapters: ctypes.Structure,
        shrink_tiles: int,
    ) -> None:
        """`multiply` of at most 64 tokens, bit for bit, and `A x` beside it, with `AdapterMaps` of its tiles."""
        kernel = self._adapted_kernel(Epilogue.STORE, partition.tile, stem=_BESIDE_STEM)
        self._multiply(_Product(Epilogue.STORE, partition, kernel, shrink_tiles), x, weight, out, adapters)

    def shrink(
        self, partition: Partition, x: Array, a: TensorMap, adapters: ctypes.Structure, *, shrink_tiles: int
    ) -> None:
        """A launch of tiles of A alone, whose map `a` is, of `AdapterMaps` that say where their sums go."""
        kernel = self._adapted_kernel(Epilogue.STORE, partition.tile)
        self._launch(_Product(Epilogue.STORE, partition, kernel, shrink_tiles), x, a, 0, x, adapters)

    def _adapted_kernel(self, epilogue: Epilogue, tile: Tile, *, stem: str = _ADAPTED_STEM) -> Kernel:
        if stem not in self._adapted:
            self._adapted[stem] = _kernels(self._device, stem=stem, tiles=_TILES_OF[stem])
        return self._adapted[stem][epilogue, tile]

    def multiply(
        self,
        epilogue: Epilogue,
        partition: Partition,
        x: Array,
        weight: Array,
        out: Array,
        *,
        weights_first: bool = True,
    ) -> None:
        """Writes a product divided in a way of the caller's: K into no more splits than it has chunks."""
        product = _Product(epilogue, partition, self._kernels[epilogue, partition.tile], 0)
        self._multiply(product, x, weight, out, weights_first=weights_first)

    def _multiply(
        self,
        product: "_Product",
        x: Array,
        weight: Array,
        out: Array,
        *more: ctypes.Structure,
        weights_first: bool = True,
    ) -> None:
        box = weight_box(product.epilogue, product.partition.tile, address(weight), weight.shape)
        self._launch(product, x, self._maps.of(box), len(weight), out, *more, weights_first=weights_first)

    def _launch(
        self,
        product: "_Product",
        x: Array,
        weight: TensorMap,
        num_rows: int,
        out: Array,
        *more: ctypes.Structure,
        weights_first: bool = True,
    ) -> None:
        """`num_rows`: of the weight, that are multiplied."""
        tile, multicast_ctas, split_k = product.partition
        num_tokens, k = x.shape
        cluster = multicast_ctas * split_k
        column_tiles = -(-num_rows // (tile.columns * multicast_ctas)) + product.shrink_tiles
        clusters = -(-num_tokens // tile.tokens) * column_tiles
        # A cluster that does not fit waits for the others to end, so there are no more than run at a time; those that
        # divide K were chosen to fit.
        if split_k == 1:  # a block takes tile after tile
            clusters = min(clusters, self._clusters_of(cluster))
        x_box = TensorBox(address(x), (k, num_tokens), (k * _BF16_BYTES,), (CHUNK, tile.tokens // multicast_ctas))
        num_outputs = num_rows // (2 if product.epilogue is Epilogue.SWIGLU else 1)
        arguments = [
            weight,
            self._maps.of(x_box),
            out,
            *(ctypes.c_int(size) for size in (num_tokens, num_outputs, k, multicast_ctas, _GROUP)),
            *more,
        ]
        blocks = (clusters * cluster, 1, 1)
        product.kernel(blocks, (tile.threads, 1, 1), arguments, overlap=weights_first, cluster=cluster)

    def _partition_of(self, epilogue: Epilogue, x: Array, weight: Array) -> Partition | None:
        n, k = weight.shape
        key = epilogue, len(x), n, k
        if key not in self._partitions:
            # Prompts have any length: without an end the table would grow as long as the process lives.
            if len(self._partitions) >= _MOST_KEPT:
                self._partitions.clear()
            self._partitions[key] = partition_product(epilogue, len(x), n, k, self._room)
        return self._partitions[key]

    def _partition(self, epilogue: Epilogue, x: Array, weight: Array) -> Partition:
        partition = self._partition_of(epilogue, x, weight)
        assert partition is not None  # noqa: S101 - `serves` has said so
        return partition

    def _clusters_of(self, blocks: int) -> int:
        """Clusters that run at a time, which is alike for all tiles: a block has a multiprocessor to itself."""
        if blocks not in self._most_clusters:
            tile = TILES[Epilogue.STORE][0]
            kernel = self._kernels[Epilogue.STORE, tile]
            # The driver is asked, as groups of multiprocessors differ in size: fewer clusters run than blocks suggest.
            self._most_clusters[blocks] = kernel.most_clusters(blocks, threads=tile.threads)
        return self._most_clusters[blocks]


_ADAPTED_TILES = {epilogue: TILES[epilogue] for epilogue in (Epilogue.STORE, Epilogue.SWIGLU)}
_TILES_OF: dict[str, _Tiles] = {
    _ADAPTED_STEM: _ADAPTED_TILES,
    _ONE_TILE_STEM: {
        epilogue: tuple(tile for tile in tiles if tile.tokens < LARGE_TOKENS)
        for epilogue, tiles in _ADAPTED_TILES.items()
    },
    _BESIDE_STEM: {Epilogue.STORE: TILES_BESIDE},
    _PROMPT_STEM: PROMPT_TILES,
}
"""That are compiled."""


class _Product(NamedTuple):
    """What a launch multiplies, and how."""

    epilogue: Epilogue
    partition: Partition
    kernel: Kernel
    shrink_tiles: int
    """Column tiles of the A's of adapters, and parts of them, besides those of the weight."""


def _kernels(device: Device, *, stem: str = _STEM, tiles: _Tiles = TILES) -> dict[tuple[Epilogue, Tile], Kernel]:
    if not device.has(stem):
        return {}
    return {
        (epilogue, tile): device.kernel(
            stem, f"{stem}_{epilogue}_{tile.tokens}x{tile.columns}", shared_bytes=SHARED_BYTES
        )
        for epilogue, of_epilogue in tiles.items()
        for tile in of_epilogue
    }


def weight_box(epilogue: Epilogue, tile: Tile, place: int, shape: tuple[int, ...]) -> TensorBox:
    """Of a weight of this address and shape: tiles of 8 rows twice, again and again: the next 8 rows, or for the gate
    those of up that belong to 8 of gate.
    """
    n, k = shape
    row_bytes = k * _BF16_BYTES
    second, third = (n // 2, 8) if epilogue is Epilogue.SWIGLU else (8, 16)
    strides_bytes = (row_bytes, second * row_bytes, third * row_bytes)
    return TensorBox(place, (k, 8, 2, n // 16), strides_bytes, (CHUNK, 8, 2, tile.columns // 16))
