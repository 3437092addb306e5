"""Products with adapters in one launch: `csrc/gemm/adapter_maps.cuh` says how. Hopper only, and plain weights."""

import ctypes
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from openinfer_kernels.cuda.common.arrays import address, fits_vectors, require
from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.cuda.common.libraries import bfloat16, cupy
from openinfer_kernels.cuda.common.tensor_maps import TensorBox, TensorMap, TensorMaps
from openinfer_kernels.cuda.gemm.decode_gemm import MOST_ADAPTED_TOKENS, DecodeGemm
from openinfer_kernels.cuda.gemm.gemm import Gemm, weight_box
from openinfer_kernels.cuda.gemm.tiles import Epilogue, Partition, PartsPartition, Tile
from openinfer_kernels.cuda.lora.adapter_maps import MOST_PIECES, AdapterMaps
from openinfer_kernels.cuda.lora.decode_adapters import decode_adapters, fits_tiles
from openinfer_kernels.cuda.lora.deferred_delta import DeferredAdapters
from openinfer_kernels.cuda.lora.lora import SHRINK_THREADS, Shrink
from openinfer_kernels.cuda.lora.prompt_shrink import STEP_COLUMNS, TILE_TOKENS, PromptShrink
from openinfer_kernels.errors import ArrayMismatchError
from openinfer_kernels.ops import Array
from openinfer_kernels.weights.adapter_columns import CHUNK_COLUMNS as CHUNK
from openinfer_kernels.weights.adapter_columns import MOST_COLUMNS, adapter_columns

_ROW_UNIT = 16
_BF16_BYTES = 2
_MOST_SPLITS = 5
_SPLIT_UNIT = 512
_SPLIT_COLUMNS = 1024
_MOST_KEPT = 4096
"""Products whose launches are known: less than a KiB and a half each."""
_MOST_HALVED_TOKENS = 512
"""Up to which `A x` is multiplied in two halves: prompts are bound by products, decode steps by memory."""
_GROUPS = (1, 4)
_INT32, _FLOAT32 = np.dtype(np.int32), np.dtype(np.float32)


class _Halves(ctypes.Structure):
    _fields_ = (("halves", ctypes.c_void_p), ("rank", ctypes.c_int), ("columns", ctypes.c_int))


class _Given(NamedTuple):
    """All that the launches of a product with adapters are told of, but for X and the weight, in numbers.

    Two products of which this is equal are told the same, whatever arrays lie there: so what is made of it is kept.
    """

    epilogue: Epilogue
    num_tokens: int
    weight_shape: tuple[int, int]
    a: int
    """The address of `[slots, P, r, k]`."""
    a_shape: tuple[int, int, int, int]
    columns: int
    """The address of `[out, E]`."""
    width: int
    """E."""
    slots: int
    shrunk: int
    """The address of `[T, P, 2, E]`; with parts of `[parts, T, P r]` in float32; of prompts of `[T, P, E]`, and then
    which steps are needed of it.
    """
    starts: tuple[int, ...]

    @property
    def rows_shape(self) -> tuple[int, int]:
        """Of A as `[slots P r, k]`."""
        num_slots, pieces, rank, inner = self.a_shape
        return num_slots * pieces * rank, inner

    @property
    def shrink_rows(self) -> int:
        """Rows of A, and those in their place where `E` has columns of no slot: of them A x is zero."""
        return self.width * self.a_shape[1]


class _Launches(NamedTuple):
    """What the launches of a product are told; read alone."""

    partition: Partition | PartsPartition
    maps: AdapterMaps
    ahead: tuple[Partition, AdapterMaps] | None
    """Of a launch of tiles that makes A x before, where the product does not."""
    prompt_rows: TensorMap | None = None
    """Of A, for `PromptShrink`, which makes A x of prompts."""


class AdaptedGemm:
    """`FusedAdapters` of one device."""

    @classmethod
    def on(cls, device: Device) -> "AdaptedGemm | None":
        """None on other GPUs than Hopper."""
        return cls(device, DecodeGemm(device), Gemm(device)) if device.has("shrink_halves") else None

    def __init__(self, device: Device, decode_gemm: DecodeGemm, gemm: Gemm) -> None:
        self._device, self._decode_gemm, self._gemm = device, decode_gemm, gemm
        self._maps = TensorMaps()
        self._launches: dict[_Given, _Launches] = {}
        self._shrink = {groups: device.kernel("shrink_halves", f"shrink_halves_{groups}") for groups in _GROUPS}

    @cached_property
    def _deferred(self) -> DeferredAdapters:
        return DeferredAdapters(self._device, self._decode_gemm, self._gemm)

    @cached_property
    def _prompt_shrink(self) -> PromptShrink:
        return PromptShrink(self._device)

    @property
    def deferred(self) -> DeferredAdapters:
        return self._deferred

    def columns(self, weight: Array, *, num_slots: int, rank: int, starts: Sequence[int]) -> int:
        rows, inner = weight.shape
        whole = rows % 64 == 0 and inner % 128 == 0 and all(start % _ROW_UNIT == 0 for start in starts)
        is_whole = whole and (starts[0], starts[-1]) == (0, rows) and fits_vectors(weight)
        columns = adapter_columns(num_slots, rank)
        return columns if is_whole and len(starts) - 1 <= MOST_PIECES and columns <= MOST_COLUMNS else 0

    def linear(
        self, x: Array, weight: Array, a: Array, columns: Array, adapter_slots: Array, *, starts: Sequence[int]
    ) -> Array:
        """`x W^T` and what adapters add; `columns [out, E]` has the B's of all slots next to each other."""
        out = cupy.empty((len(x), len(weight)), bfloat16)
        self._multiply(Epilogue.STORE, (x, weight, out), (a, columns, adapter_slots), starts)
        return out

    def linear_swiglu(
        self, x: Array, gate_up: Array, a: Array, columns: Array, adapter_slots: Array, *, starts: Sequence[int]
    ) -> Array:
        out = cupy.empty((len(x), len(gate_up) // 2), bfloat16)
        self._multiply(Epilogue.SWIGLU, (x, gate_up, out), (a, columns, adapter_slots), starts)
        return out

    def _multiply(
        self,
        epilogue: Epilogue,
        arrays: tuple[Array, Array, Array],
        adapters: tuple[Array, Array, Array],
        starts: Sequence[int],
    ) -> None:
        (x, weight, out), (a, columns, slots) = arrays, adapters
        require(x, bfloat16, ndim=2, what="x")
        require(weight, bfloat16, ndim=2, what="the weight")
        require(a, bfloat16, ndim=4, what="a")
        require(columns, bfloat16, ndim=2, what="columns")
        require(slots, _INT32, ndim=1, what="adapter_slots")
        if x.shape[1] != weight.shape[1] or a.shape[3] != x.shape[1] or len(slots) != len(x):
            raise ArrayMismatchError(f"x {x.shape}, the weight {weight.shape} and a {a.shape} are of no one product")
        if len(columns) != len(weight) or columns.shape[1] != adapter_columns(len(a), a.shape[2]):
            raise ArrayMismatchError(f"columns {columns.shape} are not those of {weight.shape} and a {a.shape}")
        if not len(x):
            return
        few = len(x) <= MOST_ADAPTED_TOKENS and self._decode_gemm.serves(x, weight)
        if few and (epilogue is Epilogue.SWIGLU or fits_tiles(starts)):
            given, _shrunk = decode_adapters(x, a, columns, slots, starts)
            self._decode_gemm.multiply_adapted(epilogue, x, weight, out, adapters=given, columns=columns)
            return
        self._multiply_many(epilogue, arrays, adapters, starts)

    def _multiply_many(
        self,
        epilogue: Epilogue,
        arrays: tuple[Array, Array, Array],
        adapters: tuple[Array, Array, Array],
        starts: Sequence[int],
    ) -> None:
        (x, weight, out), (a, columns, slots) = arrays, adapters
        a_shape, width, num_tokens = a.shape, columns.shape[1], len(x)
        num_slots, pieces, rank, _ = a_shape
        # A copy of the engine brings 16 rows of A, or another kernel makes A x.
        has_boxes = num_slots * pieces * rank % _ROW_UNIT == 0
        in_parts = None
        is_prompt = has_boxes and self._prompt_shrink.serves(num_tokens)
        if has_boxes and not is_prompt:
            shape = epilogue, num_tokens, *weight.shape
            in_parts = self._gemm.parts_partition(*shape, shrink_rows=width * pieces)
        if in_parts is not None:
            shrunk = cupy.empty((in_parts.parts, num_tokens, pieces * rank), _FLOAT32)
        elif is_prompt:
            # And behind it 32 bits for each tile of tokens.
            shrunk = cupy.empty((num_tokens * pieces * width + 2 * -(-num_tokens // TILE_TOKENS),), bfloat16)
        elif has_boxes:
            shrunk = cupy.empty((num_tokens, pieces, 2, width), bfloat16)
        else:
            shrunk = self._halves(x, a, slots, width)
        places = address(a), a_shape, address(columns), width, address(slots), address(shrunk)
        given = _Given(epilogue, num_tokens, weight.shape, *places, tuple(starts))
        launches = self._launches_of(given, in_parts, has_boxes=has_boxes, is_prompt=is_prompt)
        if launches.ahead is not None:
            partition, own = launches.ahead
            self._gemm.shrink(partition, x, own.a, own, shrink_tiles=own.shrink_tiles)
        maps, partition = launches.maps, launches.partition
        if isinstance(partition, PartsPartition):
            multiply_in_parts = self._gemm.multiply_in_parts
            multiply_in_parts(epilogue, partition, x, weight, out, adapters=maps, shrink_tiles=maps.shrink_tiles)
        elif launches.prompt_rows is not None:
            self._prompt_shrink.shrink(x, launches.prompt_rows, maps, num_slots=num_slots)
            self._gemm.multiply_prompt(epilogue, partition, x, weight, out, adapters=maps)
        else:
            multiply_adapted = self._gemm.multiply_adapted
            multiply_adapted(epilogue, partition, x, weight, out, adapters=maps, shrink_tiles=maps.shrink_tiles)

    def _launches_of(
        self, given: _Given, in_parts: PartsPartition | None, *, has_boxes: bool, is_prompt: bool
    ) -> _Launches:
        """Making them takes the host longer than to launch them, and prompts wait for it: they are kept. The other
        arguments follow from `given`.
        """
        found = self._launches.get(given)
        if found is None:
            if len(self._launches) >= _MOST_KEPT:
                self._launches.clear()  # addresses of activations come and go
            if is_prompt:
                found = self._made_prompt(given)
            elif in_parts is not None:
                found = self._made_in_parts(given, in_parts)
            else:
                found = self._made(given, has_boxes=has_boxes)
            self._launches[given] = found
        return found

    def _made_in_parts(self, given: _Given, in_parts: PartsPartition) -> _Launches:
        maps = self._adapter_maps(given, in_parts.partition)
        # Rounded as a product of A alone would be: it is smaller than what it is added to, which is rounded, too.
        maps.halves, maps.parts = 1, in_parts.parts
        self._map_rows(maps, given, in_parts.partition.tile)
        return _Launches(in_parts, maps, None)

    def _made_prompt(self, given: _Given) -> _Launches:
        partition = self._gemm.prompt_partition(given.epilogue, given.num_tokens, given.weight_shape[0])
        maps = self._adapter_maps(given, partition, box_columns=STEP_COLUMNS)
        pieces = given.a_shape[1]
        maps.steps = given.shrunk + given.num_tokens * pieces * given.width * _BF16_BYTES
        return _Launches(partition, maps, None, self._prompt_shrink.rows_map(given.a, *given.rows_shape))

    def _made(self, given: _Given, *, has_boxes: bool) -> _Launches:
        rows = given.shrink_rows
        partition, shrinks = self._gemm.adapted_partition(
            given.epilogue, given.num_tokens, *given.weight_shape, shrink_rows=rows
        )
        maps = self._adapter_maps(given, partition)
        if not has_boxes:
            return _Launches(partition, maps, None)
        if shrinks:
            self._map_rows(maps, given, partition.tile)
            return _Launches(partition, maps, None)
        ahead, _ = self._gemm.adapted_partition(Epilogue.STORE, given.num_tokens, 0, given.a_shape[3], shrink_rows=rows)
        own = AdapterMaps.from_buffer_copy(maps)
        self._map_rows(own, given, ahead.tile)
        return _Launches(partition, maps, (ahead, own))

    def _map_rows(self, maps: AdapterMaps, given: _Given, tile: Tile) -> None:
        """Tiles of A in a launch."""
        maps.a = self._maps.of(weight_box(Epilogue.STORE, tile, given.a, given.rows_shape))
        maps.shrink_tiles = -(-given.shrink_rows // tile.columns)

    def _halves(self, x: Array, a: Array, slots: Array, columns: int) -> Array:
        """`[T, P, 2, E]`."""
        num_tokens, inner = x.shape
        num_slots, pieces, rank, _ = a.shape
        halves = cupy.empty((num_tokens, pieces, 2, columns), bfloat16)
        groups = next((each for each in _GROUPS if num_tokens <= each * 8), _GROUPS[-1])
        # Few tokens' blocks have warps enough: to wait for others of a cluster takes longer than to read on.
        splits = 1 if groups == 1 else min(_MOST_SPLITS, -(-inner // _SPLIT_COLUMNS))
        split_columns = -(-inner // splits // _SPLIT_UNIT) * _SPLIT_UNIT
        row_tiles, grid_slots = -(-pieces * rank // _ROW_UNIT), columns // rank
        given = Shrink(
            *(address(each) for each in (x, a, slots)),
            None,
            num_tokens,
            inner,
            pieces * rank,
            num_slots,
            row_tiles,
            splits,
            split_columns,
            grid_slots,
        )
        blocks = -(-num_tokens // (groups * 8)) * row_tiles * splits * grid_slots
        target = _Halves(address(halves), rank, columns)
        self._shrink[groups](
            (blocks, 1, 1), (SHRINK_THREADS[groups], 1, 1), [given, target], overlap=True, cluster=splits
        )
        return halves

    def _adapter_maps(self, given: _Given, partition: Partition, *, box_columns: int = CHUNK) -> AdapterMaps:
        tile, multicast_ctas, _ = partition
        width, starts, num_tokens = given.width, given.starts, given.num_tokens
        row_units = tile.columns // _ROW_UNIT
        _, pieces, rank, _ = given.a_shape
        row_bytes = width * _BF16_BYTES
        is_gated = given.epilogue is Epilogue.SWIGLU
        maps = AdapterMaps(
            slots=given.slots,
            out=given.shrunk,
            pieces=pieces,
            columns=width,
            rank=rank,
            halves=2 if num_tokens <= _MOST_HALVED_TOKENS else 1,
        )
        for piece in range(pieces):
            rows = starts[piece + 1] - starts[piece]
            # Where rows of gate and up alternate by 8, a map has only one of the two.
            sizes = (width, 8, 1, rows // 8) if is_gated else (width, 8, 2, rows // _ROW_UNIT)
            strides = (row_bytes, 8 * row_bytes, (8 if is_gated else _ROW_UNIT) * row_bytes)
            place = given.columns + starts[piece] * row_bytes
            maps.b[piece] = self._maps.of(TensorBox(place, sizes, strides, (box_columns, 8, 2, row_units)))
            maps.starts[piece] = 0 if is_gated else starts[piece] // _ROW_UNIT
        token_values = pieces * width * (1 if box_columns == STEP_COLUMNS else 2)
        box = (box_columns, tile.tokens // multicast_ctas)
        plane = TensorBox(given.shrunk, (token_values, num_tokens), (token_values * _BF16_BYTES,), box)
        maps.shrunk = self._maps.of(plane)
        return maps
