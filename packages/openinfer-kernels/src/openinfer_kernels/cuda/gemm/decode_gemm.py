"""Products for few tokens: `csrc/gemm/decode_gemm.cu` streams each weight once, at the speed of memory. Hopper only."""

import ctypes
from typing import Any

from openinfer_kernels.cuda.common.arrays import address, fits_vectors
from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.cuda.common.launch import Kernel
from openinfer_kernels.cuda.common.tensor_maps import TensorBox, TensorMaps
from openinfer_kernels.cuda.gemm.tiles import Epilogue
from openinfer_kernels.cuda.lora.decode_adapters import DecodeAdapters
from openinfer_kernels.ops import Array

_STEM, _ADAPTED_STEM, _BESIDE_STEM = "decode_gemm", "adapted_decode_gemm", "decode_gemm_beside_adapters"
_BF16_BYTES = 2
_ROWS = 64
_SLICE_ROWS = 16
_SLICES_OF_GATES = 5
"""Of 16 rows of gate and up that a block multiplies, where all blocks run at a time so; else tiles have 64 rows."""
_SHARED_KIB_OF_SLICES = {8: 113, 16: 113}
"""As `_SHARED_KIB`. With more tokens norms wait for room, and tiles of 64 rows are as fast."""
_BOX_COLUMNS = 64
_CHUNK_COLUMNS = 128
_THREADS, _ADAPTED_THREADS = 160, 192
_MOST_BLOCKS_PER_TILE = 3
_BLOCKS_PER_MULTIPROCESSOR = 2
# At most half of a multiprocessor's shared memory: the next product's blocks move in next to those of the last one and
# fetch their weights while it ends.
_SHARED_KIB = {8: 113, 16: 89, 32: 89}
"""Of a block, by the most tokens of a kernel."""
_MOST_TOKENS = max(_SHARED_KIB)
"""Beyond it, cuBLASLt is faster: see docs/notes/kernels.md."""
_SHRUNK_TOKENS = 16
"""That a block which makes a part of `A x` has at most."""
MOST_ADAPTED_TOKENS = 16
"""With more, tiles of 64 tokens are quicker with adapters, though not without."""


class DecodeGemm:
    """The products on one device; on GPUs other than Hopper it serves none."""

    def __init__(self, device: Device, *, most_blocks_per_tile: int = _MOST_BLOCKS_PER_TILE) -> None:
        """`most_blocks_per_tile`: blocks that may share a tile by dividing K."""
        self._num_multiprocessors = device.num_multiprocessors
        self._most_blocks_per_tile = most_blocks_per_tile
        self._store = _kernels(device, "store")
        self._swiglu = _kernels(device, "swiglu")
        self._gates = _kernels(device, "swiglu", of_slices=True)
        self._float32 = _kernels(device, "float32")
        self._device = device
        self._adapted: dict[tuple[Epilogue, bool], dict[int, Kernel]] = {}
        self._beside: dict[int, Kernel] = {}
        self._maps = TensorMaps()

    def serves(self, x: Array, weight: Array) -> bool:
        """Whether it multiplies `x [T, k]` and `weight [n, k]`: few tokens, whole tiles, aligned arrays."""
        n, k = weight.shape
        whole = n % _ROWS == 0 and k % _CHUNK_COLUMNS == 0 and n > 0 and k > 0
        return whole and 0 < len(x) <= _MOST_TOKENS and bool(self._store) and fits_vectors(x, weight)

    def takes_slices(self, rows: int, *, others: int = 0) -> bool:
        """Whether tiles of gate and up have five slices: each multiprocessor then has as much to read as the others,
        where with tiles of 64 rows some have twice as much. `others`: blocks that run with them.
        """
        most = _BLOCKS_PER_MULTIPROCESSOR * self._num_multiprocessors
        slices = -(-rows // (_SLICE_ROWS * most))
        return slices == _SLICES_OF_GATES and -(-rows // (_SLICE_ROWS * slices)) + others <= most

    def linear(self, x: Array, weight: Array, out: Array, *, weights_first: bool = True) -> None:
        """Writes `x [T, k] @ weight [n, k].T` into `out [T, n]`; contiguous BF16 arrays that it serves.

        With `weights_first` the weight may be read while operators ahead on the stream still run, so it must not be
        what they write.
        """
        self._multiply(self._store, x, _rows_box(weight), out, overlap=weights_first)

    def linear_float32(self, x: Array, weight: Array, out: Array) -> None:
        self._multiply(self._float32, x, _rows_box(weight), out)

    def linear_swiglu(self, x: Array, gate_up: Array, out: Array, *, weights_first: bool = True) -> None:
        """Gate and up are the halves of `gate_up [2 F, k]`; `out [T, F]`."""
        if self.takes_slices(len(gate_up)) and _tokens_of(len(x)) in self._gates:
            self._multiply(self._gates, x, _gate_box(gate_up, _SLICES_OF_GATES), out, overlap=weights_first)
        else:
            self._multiply(self._swiglu, x, _gate_box(gate_up), out, overlap=weights_first)

    def multiply_adapted(
        self, epilogue: Epilogue, x: Array, weight: Array, out: Array, *, adapters: DecodeAdapters, columns: Array
    ) -> None:
        """`columns [n, E]`: the B's of all slots next to each other."""
        of_slices = epilogue is Epilogue.SWIGLU and self.takes_slices(len(weight), others=adapters.parts)
        key = epilogue, of_slices
        if key not in self._adapted:
            self._adapted[key] = _kernels(
                self._device, epilogue, stem=_ADAPTED_STEM, most=MOST_ADAPTED_TOKENS, of_slices=of_slices
            )
        if epilogue is Epilogue.SWIGLU:
            slices = _SLICES_OF_GATES if of_slices else _ROWS // _SLICE_ROWS
            box, of_columns = _gate_box(weight, slices), _gate_box(columns, slices)
        else:
            box, of_columns = _rows_box(weight), _rows_box(columns)
        adapters.b = self._maps.of(of_columns)
        self._multiply(self._adapted[key], x, box, out, adapters)

    def multiply_beside(self, x: Array, weight: Array, out: Array, *, adapters: DecodeAdapters) -> None:
        """`linear` of more than 16 tokens, bit for bit, and `A x` beside it.

        Of gate and up sums are those of `linear_swiglu`.
        """
        if not self._beside:
            self._beside = _kernels(self._device, "store", stem=_BESIDE_STEM, least=MOST_ADAPTED_TOKENS + 1)
        self._multiply(self._beside, x, _rows_box(weight), out, adapters)

    def _multiply(
        self,
        kernels: dict[int, Kernel],
        x: Array,
        weight: TensorBox,
        out: Array,
        adapters: DecodeAdapters | None = None,
        *,
        overlap: bool = True,
    ) -> None:
        num_tokens, k = x.shape
        n = weight.sizes[1] * weight.sizes[2] * weight.sizes[3]
        tokens = _tokens_of(num_tokens)
        # The map ends at the last token, and the copy engine fills up with zeros: nothing is padded or copied.
        x_box = TensorBox(address(x), (k, num_tokens), (k * _BF16_BYTES,), (_BOX_COLUMNS, tokens))
        sizes = [ctypes.c_int(size) for size in (num_tokens, n, k)]
        blocks, cluster = self._partition(n, weight.box[3] * _SLICE_ROWS, k // _CHUNK_COLUMNS)
        arguments: list[Any] = [self._maps.of(weight), self._maps.of(x_box), out, *sizes]
        if adapters is not None:
            parts = adapters.parts * (-(-tokens // _SHRUNK_TOKENS) if kernels is self._beside else 1)
            adapters.shrink_blocks = -(-parts // cluster) * cluster
            blocks += adapters.shrink_blocks
            arguments.append(adapters)
        threads = _THREADS if adapters is None or kernels is self._beside else _ADAPTED_THREADS
        kernels[tokens]((blocks, 1, 1), (threads, 1, 1), arguments, overlap=overlap, cluster=cluster)

    def _partition(self, rows: int, tile_rows: int, chunks_per_tile: int) -> tuple[int, int]:
        """Blocks in all, and those that share a tile: several where there are too few tiles for the chip."""
        tiles = -(-rows // tile_rows)
        if tile_rows != _ROWS:
            return tiles, 1
        # Clusters divide K where tiles are few, and add through distributed shared memory in order of rank: no atomics,
        # so that one run twice is bit-identical.
        cluster = min(self._most_blocks_per_tile, max(1, self._num_multiprocessors // tiles), chunks_per_tile)
        if cluster > 1:
            return tiles * cluster, cluster
        tiles_per_block = -(-tiles // (_BLOCKS_PER_MULTIPROCESSOR * self._num_multiprocessors))
        return -(-tiles // tiles_per_block), 1


def _kernels(
    device: Device,
    epilogue: str,
    *,
    stem: str = _STEM,
    least: int = 0,
    most: int = _MOST_TOKENS,
    of_slices: bool = False,
) -> dict[int, Kernel]:
    if not device.has(stem):
        return {}
    end = "_slices" if of_slices else ""
    return {
        tokens: device.kernel(stem, f"{stem}_{epilogue}_{tokens}{end}", shared_bytes=kib << 10)
        for tokens, kib in (_SHARED_KIB_OF_SLICES if of_slices else _SHARED_KIB).items()
        if least <= tokens <= most
    }


def _tokens_of(num_tokens: int) -> int:
    """Of the kernel that multiplies so many."""
    return next(most for most in _SHARED_KIB if num_tokens <= most)


def _gate_box(gate_up: Array, slices: int = _ROWS // _SLICE_ROWS) -> TensorBox:
    n, k = gate_up.shape
    row_bytes = k * _BF16_BYTES
    return _weight_box(gate_up, second_bytes=n // 2 * row_bytes, third_bytes=8 * row_bytes, slices=slices)


def _rows_box(weight: Array) -> TensorBox:
    row_bytes = weight.shape[1] * _BF16_BYTES
    return _weight_box(weight, second_bytes=8 * row_bytes, third_bytes=16 * row_bytes)


def _weight_box(weight: Array, *, second_bytes: int, third_bytes: int, slices: int = _ROWS // _SLICE_ROWS) -> TensorBox:
    """Tiles of slices: 8 rows, twice with `second_bytes` between; slices have `third_bytes` between."""
    n, k = weight.shape
    # Four axes, so that the copy engine itself interleaves 8 rows of gate with the 8 of up: a thread ends up with both.
    strides_bytes = (k * _BF16_BYTES, second_bytes, third_bytes)
    return TensorBox(address(weight), (k, 8, 2, n // 16), strides_bytes, (_BOX_COLUMNS, 8, 2, slices))
