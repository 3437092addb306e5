"""Adapters that the kernel after a product adds, as the CUDA kernels do it, emulated, against float64.

What is left to a GPU: copies and counters that overlap, programmatic launches.
"""

import ctypes
import importlib
import re
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import numpy as np
import pytest

from openinfer_kernels import ArrayMismatchError, AttentionBatch, CacheFormat, PagedCache
from openinfer_kernels.cpu.attention.cache_formats import fp8_values
from openinfer_kernels.ops.lora import AddedBy, DeltaOperator
from openinfer_kernels.weights.adapter_columns import adapter_columns

MULTIPROCESSORS, MULTIPROCESSORS_OF_MANY = 6, 28
CLUSTERS = {1: 28, 2: 14, 3: 9, 4: 7}
"""Of so many blocks, that run at a time with more tokens."""
BY_NORM = AddedBy(DeltaOperator.ADD_RMS_NORM)
EPS = 1e-6
NO_SUCH_KERNEL = 1  # of fibers.hpp
SHARED = "extern __shared__ __align__(kAlignment) uint8_t raw[];"
NAMED_BARRIER = re.compile(r'asm volatile\("bar\.sync (\d), %0;" ::"n"\((\S+?)\) : "memory"\);')
CALLER = """#include <tuple>
#include <type_traits>
template <class... A>
int call(void (*kernel)(A...), void** given, const size_t* sizes, int blocks, int rows, int cluster, int threads) {
  std::tuple<std::remove_const_t<A>...> arguments;
  int index = 0;
  const bool fits = std::apply([&](auto&... each) {
    return ((sizes[index] == sizeof(each) ? memcpy((void*)&each, given[index++], sizeof(each)) : nullptr) && ...);
  }, arguments);
  if (!fits) return emulated::kOtherArguments;
  for (int y = 0; y < rows; y++) {
    const int outcome = RUN([&] { blockIdx.y = y, std::apply(kernel, arguments); });
    if (outcome != emulated::kDone) return outcome;
  }
  return emulated::kDone;
}
"""
PRODUCT = """#include "bfloat16.hpp"
#include "clusters.hpp"
#define RUN(...) run_clusters(blocks, cluster, threads, __VA_ARGS__)
"""
SINGLE = """#include "bfloat16.hpp"
#include "fibers.hpp"
#define RUN(...) run_grid(blocks, threads, __VA_ARGS__)
#undef __shared__
#define __shared__ static
inline float rsqrtf(float value) { return 1.0f / std::sqrt(value); }
inline float __fdiv_rn(float a, float b) { return a / b; }
"""


class Library(NamedTuple):
    head: str
    files: tuple[str, ...]
    kernels: tuple[str, ...]

    @property
    def source(self) -> str:
        includes = "".join(f'#include "{name}"\n' for name in self.files)
        calls = "".join(
            f'  if (!strcmp(kind, "{name}")) return call({name}, given, sizes, blocks, rows, cluster, threads);\n'
            for name in self.kernels
        )
        return f"""{self.head}{includes}using namespace emulated;
{CALLER}extern "C" __attribute__((visibility("default"))) int run(
    const char* kind, void** given, const size_t* sizes, int blocks, int rows, int cluster, int threads) {{
{calls}  return kNoSuchKernel;
}}
"""


LIBRARIES = {
    "decode_gemm": Library(
        PRODUCT,
        ("gemm/decode_gemm.cu", "lora/decode_gemm_beside_adapters.cu"),
        ("decode_gemm_store_32", "decode_gemm_swiglu_32", "decode_gemm_beside_adapters_store_32"),
    ),
    "gemm": Library(
        PRODUCT,
        ("gemm/gemm.cu", "lora/gemm_beside_adapters.cu"),
        (
            *(f"gemm_store_64x{columns}" for columns in (96, 112)),
            *(f"gemm_swiglu_64x{columns}" for columns in (96, 160, 192)),
            *(f"gemm_beside_adapters_store_64x{columns}" for columns in (96, 112, 160, 192)),
        ),
    ),
    "norm": Library(
        SINGLE,
        ("norm/norm.cu", "lora/adapted_norm.cu"),
        ("add_rms_norm_bfloat16_vectors", "adapted_norm_add_rms_norm"),
    ),
    "heads": Library(
        SINGLE,
        ("attention/qk_norm_rope_append.cu", "lora/adapted_heads.cu"),
        tuple(
            f"{kind}_{size}"
            for kind in ("qk_norm_rope_append_few", "adapted_heads_16", "adapted_heads_64")
            for size in (64, 128, 256)
        ),
    ),
    "heads_fp8": Library(
        SINGLE,
        ("attention_fp8/qk_norm_rope_append_fp8.cu", "attention_fp8/adapted_heads_fp8.cu"),
        tuple(
            f"{kind}_{size}"
            for kind in ("qk_norm_rope_append_fp8_few", "adapted_heads_fp8_16", "adapted_heads_fp8_64")
            for size in (64, 128, 256)
        ),
    ),
    "swiglu": Library(SINGLE, ("lora/adapted_swiglu.cu",), ("adapted_swiglu_16", "adapted_swiglu_64")),
}
OF_STEM = {
    "decode_gemm_beside_adapters": "decode_gemm",
    "gemm_beside_adapters": "gemm",
    "adapted_norm": "norm",
    "adapted_swiglu": "swiglu",
    "qk_norm_rope_append": "heads",
    "adapted_heads": "heads",
    "qk_norm_rope_append_fp8": "heads_fp8",
    "adapted_heads_fp8": "heads_fp8",
}


class Kernel:
    """As `openinfer_kernels.cuda.common.launch.Kernel` is called."""

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        self._library, self._name = library, name

    def __call__(self, grid: Any, block: Any, arguments: list[Any], *, overlap: bool, cluster: int = 1) -> None:
        values = [ctypes.c_void_p(each.ctypes.data) if isinstance(each, np.ndarray) else each for each in arguments]
        given = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        sizes = (ctypes.c_size_t * len(values))(*map(ctypes.sizeof, values))
        outcome = self._library.run(self._name.encode(), given, sizes, grid[0], grid[1], cluster, block[0])
        if outcome == NO_SUCH_KERNEL:
            raise LookupError(self._name)  # a mistake of the test
        assert outcome == 0, (self._name, outcome)

    def most_clusters(self, blocks: int, *, threads: int) -> int:
        return CLUSTERS[blocks]


class Device:
    """As much of one as the operators ask for."""

    def __init__(self, libraries: dict[str, ctypes.CDLL], num_multiprocessors: int) -> None:
        self._libraries, self.num_multiprocessors = libraries, num_multiprocessors

    def has(self, stem: str) -> bool:
        return True

    def kernel(self, stem: str, name: str, *, shared_bytes: int = 0) -> Kernel:
        return Kernel(self._libraries[OF_STEM.get(stem, stem)], name)


@pytest.fixture(scope="module")
def make_library(tmp_path_factory: pytest.TempPathFactory, emulation: Any) -> Callable[..., ctypes.CDLL]:
    """Of a name; `mistake` is a text of a file and what stands in its place."""

    def make(name: str, mistake: tuple[str, str, str] | None = None) -> ctypes.CDLL:
        folder = emulation.sources(tmp_path_factory)
        changes = [mistake] if mistake else []
        for header in ("cuda_fp16.h", "cuda_bf16.h"):
            (folder / header).write_text('#include "bfloat16.hpp"\n', "utf-8")
        if LIBRARIES[name].head is PRODUCT:
            text = (emulation.here / "cluster_hopper.cuh").read_text("utf-8")
            (folder / "csrc/common/hopper.cuh").write_text(text, "utf-8")
            (folder / "csrc/gemm/wgmma.cuh").write_text('#include "common/hopper.cuh"\n', "utf-8")
            changes += [(f"gemm/{name}.cuh", SHARED, "uint8_t* raw = emulated::shared_memory();")]
        else:
            (folder / "csrc/common/hopper.cuh").write_text("#pragma once\n", "utf-8")
        for file, old, new in changes:
            path = folder / "csrc" / file
            text = path.read_text("utf-8")
            assert text.count(old) == 1, old
            path.write_text(text.replace(old, new), "utf-8")
        path = folder / "csrc/gemm/gemm.cuh"
        path.write_text(NAMED_BARRIER.sub(r"emulated::barriers[\1].sync(\2);", path.read_text("utf-8")), "utf-8")
        return ctypes.CDLL(str(emulation.build(folder, name, LIBRARIES[name].source)))

    return make


@pytest.fixture(scope="module")
def libraries(make_library: Callable[..., ctypes.CDLL]) -> dict[str, ctypes.CDLL]:
    return {name: make_library(name) for name in LIBRARIES}


def filled(shape: Any, dtype: Any) -> np.ndarray:
    """What no kernel writes is seen; at an address that kernels take."""
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.full(count + 64, 0xFF, np.uint8)  # NaN
    begin = -memory.ctypes.data % 64
    return memory[begin : begin + count].view(dtype).reshape(shape)


@pytest.fixture(scope="module")
def modules(emulation: Any) -> Iterator[SimpleNamespace]:
    """Those of the operators, over arrays of NumPy."""

    class TensorMaps:
        """`CUtensorMap` as `cluster_hopper.cuh` reads it."""

        def of(self, tensor: Any) -> Any:
            is_plane = len(tensor.sizes) == 2
            words = (*tensor.sizes, tensor.box[1]) if is_plane else (*tensor.sizes, *tensor.strides_bytes, *tensor.box)
            made = maps.TensorMap()
            for i, word in enumerate((tensor.address, *words)):
                made.words[i] = word
            return made

    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cupy", SimpleNamespace(ndarray=np.ndarray, empty=filled))
        patch.setitem(sys.modules, "cuda.bindings.driver", MagicMock())
        arrays = importlib.import_module("openinfer_kernels.cuda.common.arrays")
        maps = importlib.import_module("openinfer_kernels.cuda.common.tensor_maps")
        patch.setattr(arrays, "address", lambda array: array.ctypes.data)
        patch.setattr(maps, "TensorMaps", TensorMaps)
        yield SimpleNamespace(
            tiles=importlib.import_module("openinfer_kernels.cuda.gemm.tiles"),
            gemm=importlib.import_module("openinfer_kernels.cuda.gemm.gemm"),
            decode=importlib.import_module("openinfer_kernels.cuda.gemm.decode_gemm"),
            adapters=importlib.import_module("openinfer_kernels.cuda.lora.decode_adapters"),
            deferred=importlib.import_module("openinfer_kernels.cuda.lora.deferred_delta"),
            norm=importlib.import_module("openinfer_kernels.cuda.norm.rms_norm"),
            heads=importlib.import_module("openinfer_kernels.cuda.attention.qk_norm_rope_append"),
        )
    for name in set(sys.modules) - before:
        if name.startswith("openinfer_kernels.cuda"):
            del sys.modules[name]


class Emulated(NamedTuple):
    """The operators on one device, which has more multiprocessors for tiles of 64 tokens."""

    decode_gemm: Any
    gemm: Any
    norm: Any
    heads: Any
    deferred: Any

    def plain(self, x: Any, weight: Any) -> np.ndarray:
        """The product without adapters."""
        out = filled((len(x), len(weight)), x.dtype)
        (self.decode_gemm if self.decode_gemm.serves(x, weight) else self.gemm).linear(x, weight, out)
        return out


def emulated(modules: Any, libraries: dict[str, ctypes.CDLL]) -> Emulated:
    few, many = (Device(libraries, count) for count in (MULTIPROCESSORS, MULTIPROCESSORS_OF_MANY))
    decode_gemm, gemm = modules.decode.DecodeGemm(few), modules.gemm.Gemm(many)
    deferred = modules.deferred.DeferredAdapters(few, decode_gemm, gemm)
    return Emulated(decode_gemm, gemm, modules.norm.Norm(few), modules.heads.QkNormRopeAppend(few), deferred)


class Product(NamedTuple):
    x: np.ndarray
    weight: np.ndarray
    a: np.ndarray
    columns: np.ndarray
    slots: np.ndarray
    starts: tuple[int, ...]
    shrunk: np.ndarray
    """`[T, P, r]` float64, zeros of a token without an adapter."""
    delta: np.ndarray
    """`[T, out]`"""

    @property
    def is_adapted(self) -> np.ndarray:
        return (self.slots >= 0) & (self.slots < len(self.a))

    def deferred(self, adapters: Any, added_by: AddedBy) -> Any:
        arrays = self.x, self.weight, self.a, self.columns, self.slots
        return adapters.linear(*arrays, starts=self.starts, added_by=added_by)


def product_of(
    on_device: Any, heights: tuple[int, ...], inner: int, rank: int, num_slots: int, num_tokens: int
) -> Product:
    """Tokens of slots, of none and of a slot that there is not, in turns."""
    rng = np.random.default_rng([num_tokens, inner, rank])
    starts = (0, *np.cumsum(heights).tolist())
    draw = lambda *shape: on_device(rng.normal(0, shape[-1] ** -0.5, shape))  # noqa: E731
    x, weight = on_device(rng.normal(0, 1, (num_tokens, inner))), draw(starts[-1], inner)
    a, b = draw(num_slots, len(heights), rank, inner), draw(num_slots, starts[-1], rank)
    columns = on_device(np.zeros((starts[-1], adapter_columns(num_slots, rank))))
    columns.reshape(starts[-1], -1, rank)[:, :num_slots] = b.transpose(1, 0, 2)
    slots = np.resize(np.array([num_slots - 1, -1, 0, 0, 1 % num_slots, num_slots], np.int32), num_tokens)
    shrunk = np.zeros((num_tokens, len(heights), rank))
    delta = np.zeros((num_tokens, starts[-1]))
    for token in np.flatnonzero((slots >= 0) & (slots < num_slots)):
        for piece in range(len(heights)):
            rows, slot = slice(starts[piece], starts[piece + 1]), slots[token]
            shrunk[token, piece] = a[slot, piece].astype(np.float64) @ x[token].astype(np.float64)
            delta[token, rows] = b[slot, rows].astype(np.float64) @ shrunk[token, piece]
    return Product(x, weight, a, columns, slots, starts, shrunk, delta)


def bits(array: np.ndarray) -> np.ndarray:
    return array.view(np.uint16 if array.dtype.itemsize == 2 else np.uint32)


def check_shrunk(product: Product, shrunk: np.ndarray) -> None:
    found = shrunk.sum(axis=0, dtype=np.float64).reshape(product.shrunk.shape)[product.is_adapted]
    np.testing.assert_allclose(found, product.shrunk[product.is_adapted], rtol=1e-4, atol=1e-4)


FEW = {
    "a tile a block": ((192, 64, 64), 640, 16, 4),
    "in a cluster": ((128,), 1408, 16, 4),
    "slots of 8": ((48, 16, 64), 256, 8, 3),
    "rank 24": ((192, 64), 128, 24, 3),
    "one large slot": ((64,), 5248, 64, 1),
    "eight slots": ((128,), 128, 16, 8),
}


@pytest.mark.parametrize("num_tokens", [17, 24, 27, 32])
@pytest.mark.parametrize("shape", FEW.values(), ids=FEW.keys())
def test_a_product_of_few_tokens_is_what_it_is_and_has_a_x_beside_it(
    modules, libraries, on_device, shape, num_tokens
) -> None:
    ops, product = emulated(modules, libraries), product_of(on_device, *shape, num_tokens)
    x, weight, a, columns, slots, starts, *_ = product
    given, shrunk = modules.adapters.decode_adapters(x, a, columns, slots, starts)
    found = filled((num_tokens, len(weight)), x.dtype)
    ops.decode_gemm.multiply_beside(x, weight, found, adapters=given)
    assert (bits(found) == bits(ops.plain(x, weight))).all()
    check_shrunk(product, shrunk)


MANY = {
    "K divided by four": ((384,), 512, 16, 4, 4),
    "K divided by three": ((256, 128, 128), 576, 16, 2, 3),
    "A in two tiles": ((96, 48), 256, 32, 2, 2),
    "more tiles than blocks": ((2560,), 128, 64, 1, 1),
    "slots of 8": ((64,), 128, 8, 4, 1),
}


@pytest.mark.parametrize("num_tokens", [33, 49, 64])
@pytest.mark.parametrize("columns", [96, 112])
@pytest.mark.parametrize("shape", MANY.values(), ids=MANY.keys())
def test_a_product_of_64_tokens_is_what_it_is_and_has_a_x_beside_it(
    modules, libraries, on_device, shape, columns, num_tokens
) -> None:
    *sizes, split_k = shape
    ops, product = emulated(modules, libraries), product_of(on_device, *sizes, num_tokens)
    x, weight, a, *_ = product
    partition = modules.tiles.Partition(modules.tiles.Tile(64, columns), 1, split_k)
    plain, found = (filled((num_tokens, len(weight)), x.dtype) for _ in range(2))
    ops.gemm.multiply(modules.tiles.Epilogue.STORE, partition, x, weight, plain)
    num_slots, pieces, rank, inner = a.shape
    shrunk = filled((1, num_tokens, pieces * rank), np.float32)
    maps = ops.deferred.maps_of(partition, a, num_slots * pieces * rank, inner)
    maps.slots, maps.out = product.slots.ctypes.data, shrunk.ctypes.data
    ops.gemm.multiply_beside(partition, x, weight, found, adapters=maps, shrink_tiles=maps.shrink_tiles)
    assert (bits(found) == bits(plain)).all()
    check_shrunk(product, shrunk)


def test_there_is_room_beside_a_product_if_no_block_gets_more_tiles(modules) -> None:
    tiles = modules.tiles
    room = tiles.Room(MULTIPROCESSORS_OF_MANY, CLUSTERS.__getitem__)
    divided, whole = (tiles.Partition(tiles.Tile(64, 96), 1, split_k) for split_k in (4, 1))
    has_room = lambda *given, rows: tiles.has_room_beside(*given, room, shrink_rows=rows)  # noqa: E731
    assert has_room(divided, 6 * 96, rows=96)
    assert not has_room(divided, 6 * 96, rows=97)
    assert not has_room(divided, 7 * 96, rows=1)
    assert has_room(whole, 54 * 96, rows=96)  # two rounds of 27 blocks
    assert not has_room(whole, 55 * 96, rows=96)


def normed(rows: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return rows / np.sqrt((rows**2).mean(axis=-1, keepdims=True) + EPS) * weight.astype(np.float64)


NORMS = {
    "four slots": ((512,), 512, 16, 4),
    "slots of 8": ((256,), 256, 8, 4),
    "rank 24": ((256,), 128, 24, 2),
    "rank 40": ((256,), 128, 40, 1),
    "eight slots": ((512,), 128, 16, 8),
    "one large slot": ((512,), 1408, 64, 1),
    "a wide row": ((2560,), 128, 16, 4),
}


def check_norm(ops: Emulated, on_device: Any, shape: Any, num_tokens: int) -> None:
    product = product_of(on_device, *shape, num_tokens)
    made = product.deferred(ops.deferred, BY_NORM)
    plain = ops.plain(product.x, product.weight)
    assert (bits(made.y) == bits(plain)).all()
    rng = np.random.default_rng(num_tokens)
    residual = rng.normal(0, 1, plain.shape).astype(np.float32)
    weight = on_device(rng.normal(1, 0.1, plain.shape[1]))
    wanted = residual + plain.astype(np.float64) + product.delta
    without = residual.copy()
    out_without = ops.norm.add_rms_norm(plain, without, weight, eps=EPS)
    again, first = residual.copy(), residual.copy()
    out = ops.deferred.add_rms_norm(made, first, weight, eps=EPS)
    assert (bits(out) == bits(ops.deferred.add_rms_norm(made, again, weight, eps=EPS))).all()
    np.testing.assert_allclose(first, wanted, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(out.astype(np.float64), normed(wanted, weight), rtol=2**-8, atol=1e-3)
    none = ~product.is_adapted
    assert (bits(out)[none] == bits(out_without)[none]).all()
    assert (bits(first)[none] == bits(without)[none]).all()
    assert not np.allclose(first[~none], without[~none], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("num_tokens", [17, 31])
@pytest.mark.parametrize("shape", NORMS.values(), ids=NORMS.keys())
def test_a_norm_adds_what_adapters_do(modules, libraries, on_device, shape, num_tokens) -> None:
    check_norm(emulated(modules, libraries), on_device, shape, num_tokens)


@pytest.mark.parametrize("num_tokens", [33, 47, 64])
@pytest.mark.parametrize("name", ["four slots", "one large slot"])
def test_a_norm_adds_what_adapters_do_to_more_tokens(modules, libraries, on_device, name, num_tokens) -> None:
    check_norm(emulated(modules, libraries), on_device, NORMS[name], num_tokens)


class Heads(NamedTuple):
    num_heads: int
    num_kv_heads: int
    head_dim: int
    inner: int
    rank: int
    num_slots: int

    @property
    def product(self) -> Any:
        sizes = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        return tuple(size * self.head_dim for size in sizes), self.inner, self.rank, self.num_slots


HEADS = {
    "of 128": Heads(4, 2, 128, 256, 16, 4),
    "two blocks": Heads(28, 6, 64, 128, 16, 2),
    "of 64": Heads(4, 2, 64, 640, 16, 2),
    "of 256": Heads(2, 1, 256, 128, 24, 2),
    "slots of 8": Heads(3, 1, 64, 128, 8, 4),
    "one large slot": Heads(4, 2, 64, 128, 64, 1),
    "eight slots": Heads(2, 1, 128, 128, 16, 8),
    "two of 32": Heads(2, 1, 128, 128, 32, 2),
}
BLOCK_TOKENS, POSITIONS = 16, 128


def check_heads(ops: Emulated, on_device: Any, heads: Heads, num_tokens: int, *, is_fp8: bool = False) -> None:
    product = product_of(on_device, *heads.product, num_tokens)
    made = product.deferred(ops.deferred, AddedBy(DeltaOperator.QK_NORM_ROPE_APPEND, heads.head_dim))
    plain = ops.plain(product.x, product.weight)
    assert (bits(made.y) == bits(plain)).all()
    rng = np.random.default_rng(num_tokens)
    angles = rng.uniform(0, 6, (POSITIONS, heads.head_dim // 2))
    rope = filled((2, POSITIONS, heads.head_dim // 2), np.float32)
    rope[...] = np.stack([np.cos(angles), np.sin(angles)])
    q_norm, k_norm = (on_device(rng.normal(1, 0.1, heads.head_dim)) for _ in range(2))
    positions = rng.integers(0, POSITIONS, num_tokens).astype(np.int32)
    num_blocks = -(-num_tokens // BLOCK_TOKENS)
    cache_slots = rng.permutation(num_blocks * BLOCK_TOKENS)[:num_tokens].astype(np.int64)
    cache_slots[3] = -1
    batch = AttentionBatch(
        positions=positions,
        query_starts=np.arange(num_tokens + 1, dtype=np.int32),
        context_lens=positions + 1,
        block_tables=(),
        cache_slots=(cache_slots,),
        max_query_tokens=1,
        max_context_tokens=POSITIONS,
    )

    def appended(call: Callable[..., Any], given: Any) -> tuple[np.ndarray, np.ndarray]:
        shape = num_blocks, 2, 2, heads.num_kv_heads, BLOCK_TOKENS, heads.head_dim
        if is_fp8:
            of_codes = BLOCK_TOKENS * heads.head_dim
            memory = filled((*shape[:4], of_codes + 4 * BLOCK_TOKENS), np.uint8)
            memory[...] = 0
            codes, scales = memory[..., :of_codes].reshape(shape), memory.view(np.float32)[..., of_codes // 4 :]
            cache = PagedCache(data=codes, layer=1, format=CacheFormat.FP8, scales=scales)
        else:
            data = filled(shape, plain.dtype)
            data[...] = 0
            cache = PagedCache(data=data, layer=1)
        norms = {"q_norm": q_norm, "k_norm": k_norm, "eps": EPS}
        q = call(given, **norms, rope=rope, cache=cache, batch=batch)
        if is_fp8:
            data = fp8_values(codes, scales)
        assert not data[:, 0].any()
        tokens = data[:, 1].transpose(0, 3, 1, 2, 4).reshape(-1, 2 * heads.num_kv_heads, heads.head_dim)
        own = tokens[np.maximum(cache_slots, 0)].copy()
        own[cache_slots < 0] = 0
        return q, own

    q, kv = appended(ops.deferred.qk_norm_rope_append, made)
    q_without, kv_without = appended(ops.heads.qk_norm_rope_append, plain)
    none = ~product.is_adapted
    for found, without in ((q, q_without), (kv, kv_without)):
        assert (bits(found)[none] == bits(without)[none]).all()
        assert not (bits(found)[~none] == bits(without)[~none]).all(axis=(1, 2)).any(where=cache_slots[~none] >= 0)
    wanted = (plain.astype(np.float64) + product.delta).reshape(num_tokens, -1, heads.head_dim)
    cosines, sines = (each[positions][:, None].astype(np.float64) for each in rope)

    def rotated(values: np.ndarray, weight: np.ndarray) -> np.ndarray:
        one, other = np.split(normed(values, weight), 2, axis=-1)
        return np.concatenate([one * cosines - other * sines, other * cosines + one * sines], axis=-1)

    ends = heads.num_heads, heads.num_heads + heads.num_kv_heads
    queries, keys, values = np.split(wanted, ends, axis=1)
    expected = np.concatenate([rotated(keys, k_norm), values], axis=1)
    expected[cache_slots < 0] = 0
    close = {"rtol": 2**-8, "atol": 2e-3}
    np.testing.assert_allclose(q.astype(np.float64), rotated(queries, q_norm), **close)
    cached = {"rtol": 2**-4 + 2**-7, "atol": 4e-3} if is_fp8 else close
    np.testing.assert_allclose(kv.astype(np.float64), expected, **cached)


@pytest.mark.parametrize("num_tokens", [17, 31])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS.keys())
def test_heads_add_what_adapters_do(modules, libraries, on_device, heads, num_tokens) -> None:
    check_heads(emulated(modules, libraries), on_device, heads, num_tokens)


@pytest.mark.parametrize("num_tokens", [33, 64])
def test_heads_add_what_adapters_do_to_more_tokens(modules, libraries, on_device, num_tokens) -> None:
    check_heads(emulated(modules, libraries), on_device, HEADS["of 64"], num_tokens)


GATES = {
    "four slots": (96, 640, 16, 4),
    "slots of 8": (32, 256, 8, 4),
    "eight slots": (64, 128, 16, 8),
    "rank 24": (64, 128, 24, 2),
    "one large slot": (160, 1408, 64, 1),
}
"""F, the inner size, rank and slots."""
GATES_OF_MANY = {
    "tiles of 96": (1280, 128, 16, 2),
    "tiles of 160": (2080, 64, 16, 4),
    "tiles of 192": (2496, 64, 8, 4),
    "eight slots": (1152, 64, 16, 8),
    "rank 24": (1152, 64, 24, 2),
    "one large slot": (1248, 64, 64, 1),
}


def check_gates(ops: Emulated, on_device: Any, tiles: Any, shape: Any, num_tokens: int) -> None:
    width, *rest = shape
    product = product_of(on_device, (width, width), *rest, num_tokens)
    x, weight, a, columns, slots, starts, *_ = product
    found = ops.deferred.linear_swiglu(x, weight, a, columns, slots, starts=starts)
    without, plain = filled((num_tokens, width), x.dtype), filled((num_tokens, 2 * width), x.dtype)
    if ops.decode_gemm.serves(x, weight):
        ops.decode_gemm.linear(x, weight, plain)
        ops.decode_gemm.linear_swiglu(x, weight, without)
    else:
        ops.gemm.multiply(tiles.Epilogue.STORE, tiles.Partition(tiles.Tile(64, 96), 1, 1), x, weight, plain)
        ops.gemm.linear_swiglu(x, weight, without)
    none = ~product.is_adapted
    assert (bits(found)[none] == bits(without)[none]).all()
    sums = on_device(plain.astype(np.float64) + product.delta).astype(np.float64)
    gate, up = sums[:, :width], sums[:, width:]
    expected = gate / (1 + np.exp(-gate)) * up
    np.testing.assert_allclose(found.astype(np.float64), expected, rtol=2**-6, atol=1e-3)
    assert (bits(found) == bits(on_device(expected))).mean() > 0.9  # both roundings are the kernel's
    assert not np.allclose(found[~none].astype(float), without[~none].astype(float), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("num_tokens", [17, 31])
@pytest.mark.parametrize("shape", GATES.values(), ids=GATES.keys())
def test_gates_add_what_adapters_do(modules, libraries, on_device, shape, num_tokens) -> None:
    check_gates(emulated(modules, libraries), on_device, modules.tiles, shape, num_tokens)


@pytest.mark.parametrize("num_tokens", [33, 64])
@pytest.mark.parametrize("shape", GATES_OF_MANY.values(), ids=GATES_OF_MANY.keys())
def test_gates_add_what_adapters_do_to_more_tokens(modules, libraries, on_device, shape, num_tokens) -> None:
    check_gates(emulated(modules, libraries), on_device, modules.tiles, shape, num_tokens)


def test_gates_take_the_tile_of_which_a_block_reads_least(modules) -> None:
    tiles = modules.tiles

    def columns(rows: int, shrink_rows: int) -> int | None:
        room = tiles.Room(132, {1: 132}.__getitem__)
        found = tiles.partition_gates_beside(rows, room, shrink_rows=shrink_rows)
        return None if found is None else found.tile.columns

    assert [columns(rows, 128) for rows in (2 * 3072, 2 * 9728, 2 * 12288)] == [96, 160, 192]
    assert columns(132 * 192, 128) == 112  # where 192 leaves no room for A


@pytest.mark.parametrize("name", ["of 128", "two blocks", "of 256", "one large slot"])
def test_heads_add_what_adapters_do_into_a_cache_in_fp8(modules, libraries, on_device, name) -> None:
    check_heads(emulated(modules, libraries), on_device, HEADS[name], 27, is_fp8=True)


def test_what_is_deferred_is_a_rule_of_shapes(modules, libraries, on_device) -> None:
    ops = emulated(modules, libraries).deferred

    def serves(heights: tuple[int, ...], rank: int, num_tokens: int, added_by: AddedBy | None) -> bool:
        starts = (0, *np.cumsum(heights).tolist())
        weight, a = np.zeros((starts[-1], 0)), np.zeros((1, len(heights), rank, 0))
        return ops.serves(weight, a, num_tokens=num_tokens, starts=starts, added_by=added_by)

    by_heads = AddedBy(DeltaOperator.QK_NORM_ROPE_APPEND, 64)
    assert [serves((256,), 16, tokens, BY_NORM) for tokens in (16, 17, 64, 65)] == [False, True, True, False]
    assert [serves((256,), rank, 17, BY_NORM) for rank in (64, 72)] == [True, False]
    assert [serves((rows,), 16, 17, BY_NORM) for rows in (128, 4096, 4352)] == [False, True, False]
    assert not serves((128, 128), 16, 17, BY_NORM)
    assert serves((128, 64, 64), 16, 17, by_heads)
    assert not serves((128, 64), 16, 17, by_heads)
    assert not serves((128, 96, 32), 16, 17, by_heads)
    assert not serves((192, 96, 96), 16, 17, AddedBy(DeltaOperator.QK_NORM_ROPE_APPEND, 96))
    assert [serves((rows, 96), 16, 17, None) for rows in (96, 64)] == [True, False]
    assert [serves((rows, rows), 16, 17, None) for rows in (80, 96)] == [False, True]
    assert [serves((96, 96), 16, tokens, None) for tokens in (16, 17, 64, 65)] == [False, True, True, False]


def test_a_product_without_room_beside_it_is_not_deferred(modules, libraries, on_device) -> None:
    ops = emulated(modules, libraries)
    product = product_of(on_device, (512,), 256, 32, 4, 40)  # 128 rows of A: two tiles, where one cluster is left
    assert product.deferred(ops.deferred, BY_NORM) is None
    assert product_of(on_device, (512,), 256, 32, 4, 30).deferred(ops.deferred, BY_NORM) is not None


def test_heads_of_another_cache_are_refused(modules, libraries, on_device) -> None:
    ops = emulated(modules, libraries)
    product = product_of(on_device, *HEADS["of 64"].product, 17)
    made = product.deferred(ops.deferred, AddedBy(DeltaOperator.QK_NORM_ROPE_APPEND, 64))
    cache = PagedCache(data=np.zeros((1, 1, 2, 1, 16, 64), product.x.dtype), layer=0)
    with pytest.raises(ArrayMismatchError, match="not Q, K and V"):
        ops.deferred.qk_norm_rope_append(made, q_norm=None, k_norm=None, eps=EPS, rope=None, cache=cache, batch=None)


@pytest.mark.parametrize(
    ("library", "mistake"),
    [
        ("norm", ("lora/deferred_delta.cuh", "+ slot_ * given_.rank + first;", "+ first;")),
        ("norm", ("lora/deferred_delta.cuh", "if (first > 0) hold(first);", "")),
        ("norm", ("lora/deferred_delta.cuh", "split < given_.splits; split++", "split < 1; split++")),
        ("norm", ("lora/deferred_delta.cuh", "return slot < given_.num_slots ? slot : -1;", "return slot;")),
        ("norm", ("lora/adapted_norm.cu", "blockIdx.x, threadIdx.x * 8", "0, threadIdx.x * 8")),
        ("heads", ("lora/adapted_heads.cuh", "kHeadDim, int(kind), values)", "kHeadDim, 0, values)")),
        ("heads", ("lora/adapted_heads.cuh", "blockIdx.y * kHeads +", "")),
        ("heads", ("lora/adapted_heads.cuh", "-sines[j] * high", "sines[j] * high")),
        ("swiglu", ("lora/deferred_tiles.cuh", "+ split * given_.num_tokens * token_values", "")),
        ("swiglu", ("lora/deferred_tiles.cuh", "if (!has(i, first, step)) a[i] = {};", "")),
        ("swiglu", ("lora/deferred_tiles.cuh", "      hold(first);\n", "")),
        ("swiglu", ("lora/deferred_tiles.cuh", "(piece + own) * given_.rank", "piece * given_.rank")),
        ("swiglu", ("lora/deferred_tiles.cuh", "+ tile * 2 + lane_ / 4 % 2", "+ tile * 2 + 1 - lane_ / 4 % 2")),
        ("swiglu", ("lora/deferred_tiles.cuh", "    return slot < given_.num_slots ? slot : -1;", "    return slot;")),
        ("swiglu", ("lora/adapted_swiglu.cu", "rounded(values[i][0][j])", "values[i][0][j]")),
        (
            "decode_gemm",
            ("lora/decode_adapters.cuh", "num_tokens + first_token + token) * rows", "num_tokens + token) * rows"),
        ),
        (
            "decode_gemm",
            ("lora/decode_adapters.cuh", "given.x + int64_t(first_token + token)", "given.x + int64_t(token)"),
        ),
        ("gemm", ("gemm/adapter_maps.cuh", "if (lower_slot == of)\n", "if (lower_slot >= 0 && slot == of)\n")),
    ],
    ids=[
        "the first slot for all",
        "the first columns for all",
        "one split",
        "a slot that there is not",
        "the first token for all",
        "Q's A x for all",
        "the first block's heads for all",
        "rotated the other way",
        "the first split again",
        "A x in the columns of all slots",
        "the first chunk of B again",
        "gate's A x for up",
        "neighbouring rows of B in each other's place",
        "a slot that there is not, for gates",
        "a gate that was not rounded",
        "A x where the first tokens have theirs",
        "the first tokens for all",
        "a token's slot for the eighth after it",
    ],
)
def test_mistakes_are_noticed(modules, libraries, make_library, on_device, library, mistake) -> None:
    ops = emulated(modules, {**libraries, library: make_library(library, mistake)})

    def check() -> None:
        if library == "heads":
            for name in ("two blocks", "slots of 8"):
                check_heads(ops, on_device, HEADS[name], 17)
        elif library == "swiglu":
            cases = (("four slots", 27), ("slots of 8", 17), ("eight slots", 31), ("one large slot", 17))
            for name, num_tokens in cases:
                check_gates(ops, on_device, modules.tiles, GATES[name], num_tokens)
        else:
            for name, num_tokens in (("four slots", 40), ("slots of 8", 17), ("one large slot", 31), ("rank 24", 27)):
                check_norm(ops, on_device, NORMS[name], num_tokens)

    with pytest.raises(AssertionError):
        check()
