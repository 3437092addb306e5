"""Products with adapters in one launch as the CUDA kernels compute them, emulated with clusters, against float64."""

import ctypes
import importlib
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple
from unittest.mock import MagicMock

import numpy as np
import pytest

from openinfer_kernels.weights.adapter_columns import adapter_columns

MULTIPROCESSORS, MULTIPROCESSORS_OF_MANY = 6, 20
CLUSTERS = {1: 20, 2: 10, 3: 6, 4: 5, 5: 4, 6: 3, 7: 2, 8: 2}
"""Of so many blocks, that run at a time with more tokens."""
GEMM = [
    *(f"adapted_gemm_store_{tokens}x{columns}" for tokens in (64, 128, 192) for columns in (96, 112)),
    *(f"adapted_gemm_swiglu_{tokens}x{columns}" for tokens in (64, 128, 192) for columns in (96, 160, 192)),
    *(f"adapted_gemm_{epilogue}_256x160" for epilogue in ("store", "swiglu")),
]
ONE_TILE = [name.replace("gemm", "gemm_one_tile") for name in GEMM[:-2]]
DECODE = [f"adapted_decode_gemm_{epilogue}_{tokens}" for epilogue in ("store", "swiglu") for tokens in (8, 16)]
DECODE += [f"adapted_decode_gemm_swiglu_{tokens}_slices" for tokens in (8, 16)]
PROMPT = [
    *(f"prompt_gemm_store_{tile}" for tile in ("128x160", "128x192", "256x160", "256x192")),
    *(f"prompt_gemm_swiglu_{tokens}x160" for tokens in (128, 192, 256)),
]
KERNELS = {"decode": DECODE, "gemm": GEMM, "one_tile": ONE_TILE, "prompt": PROMPT, "prompt_shrink": ["prompt_shrink"]}
NO_SUCH_KERNEL = 1  # of fibers.hpp
WITH_SHARED = ("gemm/decode_gemm.cuh", "gemm/gemm.cuh", "lora/prompt_shrink.cu")
SHARED = "extern __shared__ __align__(kAlignment) uint8_t raw[];"
NAMED_BARRIER = re.compile(r'asm volatile\("bar\.sync (\d), %0;" ::"n"\((\S+?)\) : "memory"\);')
CALL = '  if (!strcmp(kind, "{name}")) return run_clusters(blocks, cluster, threads, [=] {{ {name}({arguments}); }});\n'


def calls(names: Sequence[str], arguments: str) -> str:
    return "".join(CALL.format(name=name, arguments=arguments) for name in names)


def source_of_few(kernels: Sequence[str]) -> str:
    return f"""#include "bfloat16.hpp"
#include "clusters.hpp"
#include "lora/adapted_decode_gemm.cu"
using namespace emulated;
extern "C" __attribute__((visibility("default"))) int run(
    const char* kind, const CUtensorMap* w, const CUtensorMap* x, void* y, int m, int n, int k,
    const lora::DecodeAdapters* adapters, size_t bytes, int blocks, int cluster, int threads) {{
  if (bytes != sizeof(lora::DecodeAdapters)) return kOtherArguments;
{calls(kernels, "*w, *x, static_cast<bf16*>(y), m, n, k, *adapters")}
  return kNoSuchKernel;
}}
extern "C" __attribute__((visibility("default"))) unsigned left() {{ return lora::parts_ready + lora::warps_served; }}
"""


def source_of_many(name: str, kernels: Sequence[str]) -> str:
    return f"""#include "bfloat16.hpp"
#include "clusters.hpp"
#include "lora/{name}.cu"
using namespace emulated;
extern "C" __attribute__((visibility("default"))) int run(
    const char* kind, const CUtensorMap* w, const CUtensorMap* x, void* y, int m, int n, int k, int multicast_ctas,
    int group, const AdapterMaps* adapters, size_t bytes, int blocks, int cluster, int threads) {{
  if (bytes != sizeof(AdapterMaps)) return kOtherArguments;
{calls(kernels, "*w, *x, y, m, n, k, multicast_ctas, group, *adapters")}
  return kNoSuchKernel;
}}
extern "C" __attribute__((visibility("default"))) unsigned left() {{ return parts_ready + blocks_served; }}
"""


def source_of_shrunk_prompts(kernels: Sequence[str]) -> str:
    return f"""#include "bfloat16.hpp"
#include "clusters.hpp"
#include "lora/prompt_shrink.cu"
using namespace emulated;
extern "C" __attribute__((visibility("default"))) int run_prompt(
    const char* kind, const CUtensorMap* x, const CUtensorMap* a, const PromptShrink* given, size_t bytes, int blocks,
    int cluster, int threads) {{
  if (bytes != sizeof(PromptShrink)) return kOtherArguments;
{calls(kernels, "*x, *a, *given")}
  return kNoSuchKernel;
}}
"""


SOURCES = {
    "decode": source_of_few,
    "gemm": partial(source_of_many, "adapted_gemm"),
    "one_tile": partial(source_of_many, "adapted_gemm_one_tile"),
    "prompt": partial(source_of_many, "prompt_gemm"),
    "prompt_shrink": source_of_shrunk_prompts,
}
"""Of each of `Libraries`, with kernels of these names."""


class Kernel:
    """As `openinfer_kernels.cuda.common.launch.Kernel` is called."""

    called: ClassVar[set[str]] = set()
    """Names of those that were: others need not be compiled where the same is computed with a mistake."""

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        self._library, self._name = library, name

    def __call__(self, grid: Any, block: Any, arguments: list[Any], *, overlap: bool, cluster: int) -> None:
        self.called.add(self._name)
        w, x, out, *numbers, adapters = arguments
        maps = ctypes.byref(w), ctypes.byref(x), ctypes.c_void_p(out.ctypes.data)
        sizes = ctypes.c_size_t(ctypes.sizeof(adapters)), grid[0], cluster, block[0]
        given = *maps, *numbers, ctypes.byref(adapters), *sizes
        outcome = self._library.run(self._name.encode(), *given)
        if outcome == NO_SUCH_KERNEL:
            raise LookupError(self._name)  # a mistake of the test, which is not one that it is to notice
        assert outcome == 0, (self._name, outcome)
        assert self._library.left() == 0, "counters are left as they were found"

    def most_clusters(self, blocks: int, *, threads: int) -> int:
        return CLUSTERS[blocks]


class PromptKernel(Kernel):
    clusters: ClassVar[set[int]] = set()
    """Blocks of those that were launched."""

    def __call__(self, grid: Any, block: Any, arguments: list[Any], *, overlap: bool, cluster: int) -> None:
        self.called.add(self._name)
        self.clusters.add(cluster)
        x, a, given = map(ctypes.byref, arguments)
        sizes = ctypes.c_size_t(ctypes.sizeof(arguments[2])), grid[0], cluster, block[0]
        outcome = self._library.run_prompt(self._name.encode(), x, a, given, *sizes)
        assert outcome == 0, (self._name, outcome)


class Libraries(NamedTuple):
    decode: ctypes.CDLL
    gemm: ctypes.CDLL
    one_tile: ctypes.CDLL
    prompt: ctypes.CDLL
    prompt_shrink: ctypes.CDLL


@pytest.fixture(scope="module")
def make_library(tmp_path_factory: pytest.TempPathFactory, emulation: Any) -> Callable[..., ctypes.CDLL]:
    """Of the kernels of a source; `mistake` is a text of a file and what stands in its place."""

    def make(source: str, mistake: tuple[str, str, str] | None = None) -> ctypes.CDLL:
        folder = emulation.sources(tmp_path_factory)
        text = (emulation.here / "cluster_hopper.cuh").read_text("utf-8")
        (folder / "csrc/common/hopper.cuh").write_text(text, "utf-8")
        (folder / "csrc/gemm/wgmma.cuh").write_text('#include "common/hopper.cuh"\n', "utf-8")
        for name in ("cuda_fp16.h", "cuda_bf16.h"):
            (folder / name).write_text('#include "bfloat16.hpp"\n', "utf-8")
        shared = [(name, SHARED, "uint8_t* raw = emulated::shared_memory();") for name in WITH_SHARED]
        for name, old, new in [*shared, *([mistake] if mistake else [])]:
            path = folder / "csrc" / name
            text = path.read_text("utf-8")
            assert text.count(old) == 1, old
            path.write_text(text.replace(old, new), "utf-8")
        path = folder / "csrc/gemm/gemm.cuh"
        path.write_text(NAMED_BARRIER.sub(r"emulated::barriers[\1].sync(\2);", path.read_text("utf-8")), "utf-8")
        return ctypes.CDLL(str(emulation.build(folder, "adapted", source)))

    return make


@pytest.fixture(scope="module")
def libraries(make_library: Callable[..., ctypes.CDLL]) -> Libraries:
    return Libraries(**{name: make_library(SOURCES[name](KERNELS[name])) for name in Libraries._fields})


@pytest.fixture(scope="module")
def mistaken(
    modules: SimpleNamespace, libraries: Libraries, make_library: Callable[..., ctypes.CDLL]
) -> Callable[..., Any]:
    """The operator with a mistake in those kernels of a library that some products call; they are right without it."""
    of_products: dict[Products, list[str]] = {}

    def make(name: str, mistake: tuple[str, str, str], products: Products) -> Any:
        if products not in of_products:
            Kernel.called.clear()
            products.check(fused_of(modules, libraries))
            of_products[products] = sorted(Kernel.called)
        kernels = [each for each in of_products[products] if each in KERNELS[name]]
        return fused_of(modules, libraries._replace(**{name: make_library(SOURCES[name](kernels), mistake)}))

    return make


@pytest.fixture(scope="module")
def modules(emulation: Any) -> Iterator[SimpleNamespace]:
    """Those of the products, over arrays of NumPy."""

    class TensorMaps:
        """`CUtensorMap` as `cluster_hopper.cuh` reads it."""

        num_asked = 0

        def of(self, tensor: Any) -> Any:
            assert tensor.box[0] in (16, 64)
            TensorMaps.num_asked += 1
            is_plane = len(tensor.sizes) == 2
            words = (
                (*tensor.sizes, *tensor.box[::-1]) if is_plane else (*tensor.sizes, *tensor.strides_bytes, *tensor.box)
            )
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
            epilogue=importlib.import_module("openinfer_kernels.cuda.gemm.tiles").Epilogue,
            gemm=importlib.import_module("openinfer_kernels.cuda.gemm.gemm"),
            decode=importlib.import_module("openinfer_kernels.cuda.gemm.decode_gemm"),
            fused=importlib.import_module("openinfer_kernels.cuda.lora.adapted_gemm"),
            prompt=importlib.import_module("openinfer_kernels.cuda.lora.prompt_shrink"),
            prompt_tiles=importlib.import_module("openinfer_kernels.cuda.gemm.tiles"),
            adapter_maps=importlib.import_module("openinfer_kernels.cuda.lora.adapter_maps"),
            maps=TensorMaps,
        )
    for name in set(sys.modules) - before:
        if name.startswith("openinfer_kernels.cuda"):
            del sys.modules[name]


def filled(shape: Any, dtype: Any) -> np.ndarray:
    """What no kernel writes is seen."""
    return np.full(shape, np.nan, dtype)


class Device:
    """As much of one as the products ask for."""

    def __init__(self, libraries: Libraries, num_multiprocessors: int) -> None:
        self._libraries, self.num_multiprocessors = libraries, num_multiprocessors

    def has(self, stem: str) -> bool:
        return True

    def kernel(self, stem: str, name: str, *, shared_bytes: int = 0) -> Kernel:
        if stem == "prompt_shrink":
            return PromptKernel(self._libraries.prompt_shrink, name)
        libraries = {"adapted_decode_gemm": "decode", "adapted_gemm_one_tile": "one_tile", "prompt_gemm": "prompt"}
        return Kernel(getattr(self._libraries, libraries.get(stem, "gemm")), name)


def product(
    on_device: Any,
    heights: tuple[int, ...],
    inner: int,
    rank: int,
    num_slots: int,
    num_tokens: int,
    *,
    are_prompts: bool = False,
) -> Any:
    """x, the weight, A, the columns of B, slots and starts; and what the product is in float64.

    Tokens of slots and of none in turns; or with `are_prompts` those of none, and of each slot, next to each other.
    """
    rng = np.random.default_rng(num_tokens)
    starts = (0, *np.cumsum(heights).tolist())
    draw = lambda *shape: on_device(rng.normal(0, shape[-1] ** -0.5, shape))  # noqa: E731
    x, weight = on_device(rng.normal(0, 1, (num_tokens, inner))), draw(starts[-1], inner)
    a, b = draw(num_slots, len(heights), rank, inner), draw(num_slots, starts[-1], rank)
    columns = on_device(np.zeros((starts[-1], adapter_columns(num_slots, rank))))
    columns.reshape(starts[-1], -1, rank)[:, :num_slots] = b.transpose(1, 0, 2)
    slots = np.resize(np.array([num_slots - 1, -1, 0, 0, 1 % num_slots, num_slots], np.int32), num_tokens)
    if are_prompts:
        slots = (np.arange(num_tokens) * (num_slots + 1) // num_tokens - 1).astype(np.int32)
    wide = [np.asarray(each, np.float64) for each in (x, weight, a, b)]
    y = wide[0] @ wide[1].T
    for token, slot in enumerate(slots):
        if not 0 <= slot < num_slots:
            continue
        for piece in range(len(heights)):
            rows = slice(starts[piece], starts[piece + 1])
            y[token, rows] += wide[3][slot, rows] @ (wide[2][slot, piece] @ wide[0][token])
    return (x, weight, a, columns, slots), starts, y


def gated(y: np.ndarray, dtype: Any) -> np.ndarray:
    gate, up = (half.astype(dtype).astype(np.float64) for half in np.split(y, 2, axis=1))
    return gate / (1 + np.exp(-gate)) * up


def distance(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(found.astype(np.float64) - wanted) / np.linalg.norm(wanted))


SHAPES = {
    "Q, K and V": ((192, 64, 64), 640, 16, 4),
    "in a cluster": ((128,), 1408, 16, 4),
    "slots of 8": ((48, 16, 64), 256, 8, 3),
    "a tile of three pieces": ((80, 16, 32), 256, 16, 4),
    "rank 24": ((512, 512), 128, 24, 3),
    "one large slot": ((64,), 5248, 64, 1),
    "two steps a slot": ((832,), 128, 32, 4),
    "two chunks": ((128,), 128, 16, 8),
    "two long tiles": ((512, 512), 2560, 16, 4),
    "tiles of 80 rows": ((416, 416), 256, 8, 1),
}


def fused_parts(modules: Any, libraries: Libraries) -> tuple[Any, Any, Any]:
    few, many = (Device(libraries, count) for count in (MULTIPROCESSORS, MULTIPROCESSORS_OF_MANY))
    return few, modules.decode.DecodeGemm(few), modules.gemm.Gemm(many)


def fused_of(modules: Any, libraries: Libraries) -> Any:
    return modules.fused.AdaptedGemm(*fused_parts(modules, libraries))


class Products(NamedTuple):
    """Some products, which a mistake is to be seen in."""

    on_device: Any
    shapes: tuple[Any, ...]
    tokens: tuple[int, ...]

    def check(self, gemm: Any) -> None:
        for shape in self.shapes:
            for num_tokens in self.tokens:
                check(gemm, self.on_device, shape, num_tokens)


def check(gemm: Any, on_device: Any, shape: Any, num_tokens: int, **how: bool) -> None:
    """Twice the same bits, and near float64."""
    given, starts, wanted = product(on_device, *shape, num_tokens, **how)
    found = [gemm.linear(*given, starts=starts) for _ in range(2)]
    assert (found[0].view(np.uint16) == found[1].view(np.uint16)).all()
    assert distance(found[0], wanted) < 4e-3
    np.testing.assert_allclose(found[0].astype(np.float64), wanted, atol=2e-2 * np.abs(wanted).max())
    if len(starts) == 3:
        gate = gemm.linear_swiglu(*given, starts=starts)
        assert distance(gate, gated(wanted, given[0].dtype)) < 1.5e-2


def test_gate_and_up_are_in_tiles_of_80_rows_where_all_blocks_run_at_a_time(modules, libraries):
    few = modules.decode.DecodeGemm(Device(libraries, MULTIPROCESSORS))
    rows = sum(SHAPES["tiles of 80 rows"][0])
    assert few.takes_slices(rows, others=1)  # 11 tiles, the last of two slices, and a part of A x: 12 blocks at a time
    assert not few.takes_slices(rows, others=2)
    assert not few.takes_slices(1024)


@pytest.mark.parametrize("num_tokens", [1, 5, 13, 16])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_few_tokens_have_what_their_adapters_add(modules, libraries, on_device, shape, num_tokens):
    check(fused_of(modules, libraries), on_device, shape, num_tokens)


MANY = {
    "Q, K and V": ((192, 64, 64), 256, 16, 4),
    "K divided": ((64,), 512, 16, 4),
    "A in two tiles": ((64, 64), 128, 32, 4),
    "gate and up": ((128, 128), 192, 16, 3),
    "several tiles": ((640,), 128, 64, 1),
    "slots of 8": ((64,), 128, 8, 4),
    "two chunks of B": ((128, 128), 192, 16, 8),
}


OF_ONE_TILE, OF_SEVERAL_TILES = [17, 33, 100, 150], [200, 260, 530, 1030]


@pytest.mark.parametrize("num_tokens", OF_ONE_TILE + OF_SEVERAL_TILES)
@pytest.mark.parametrize("shape", MANY.values(), ids=MANY.keys())
def test_more_tokens_have_what_their_adapters_add(modules, libraries, on_device, shape, num_tokens):
    check(fused_of(modules, libraries), on_device, shape, num_tokens)


WIDE = ((208, 208), 6144, 16, 4)
"""Of which tiles of 112 rows make A x in two tiles, each of groups of 32 columns, the last of which has 16."""


def test_tiles_of_a_that_are_no_whole_groups(modules, libraries, make_library, on_device):
    heights, inner, rank, num_slots = WIDE
    sizes, rows = (33, sum(heights), inner), adapter_columns(num_slots, rank) * len(heights)
    gemm = modules.gemm.Gemm(Device(libraries, MULTIPROCESSORS_OF_MANY))
    found = gemm.parts_partition(modules.epilogue.STORE, *sizes, shrink_rows=rows)
    assert found.partition.tile.columns == 112
    given, starts, wanted = product(on_device, *WIDE, 33)
    Kernel.called.clear()
    assert distance(fused_of(modules, libraries).linear(*given, starts=starts), wanted) < 4e-3
    mistake = (
        "gemm/adapter_maps.cuh",
        "min(first_column + columns, maps.columns",
        "min(first_column + 64, maps.columns",
    )
    short = libraries._replace(one_tile=make_library(SOURCES["one_tile"](sorted(Kernel.called)), mistake))
    assert not distance(fused_of(modules, short).linear(*given, starts=starts), wanted) < 4e-3


@pytest.mark.parametrize("shape", [MANY[name] for name in ("Q, K and V", "slots of 8", "two chunks of B")], ids=str)
def test_prompts_multiply_the_columns_of_their_adapters_alone(modules, libraries, make_library, on_device, shape):
    """Where tokens of a tile have one adapter, or none; without steps that are half a slot's, ranks of 8 miss some."""
    Kernel.called.clear()
    check(fused_of(modules, libraries), on_device, shape, 700, are_prompts=True)
    check(fused_of(modules, libraries), on_device, shape, 150, are_prompts=True)
    check(fused_of(modules, libraries), on_device, shape, 300, are_prompts=True)
    kernels = sorted(Kernel.called & set(KERNELS["gemm"]))
    if shape[2] == 8:
        mistake = "gemm/gemm.cuh", "maps.rank - column + 15) / 16", "maps.rank - column) / 16"
        gemm = fused_of(modules, libraries._replace(gemm=make_library(SOURCES["gemm"](kernels), mistake)))
        with pytest.raises(AssertionError):
            check(gemm, on_device, shape, 300, are_prompts=True)


def test_blocks_that_have_several_tiles(modules, libraries, on_device):
    """Of one tile of tokens, next to blocks that make A x, which all blocks wait for once."""
    shape = (992, 992), 128, 16, 4
    rows, tiles = adapter_columns(4, 16) * 2, -(-992 * 2 // 96)
    gemm = modules.gemm.Gemm(Device(libraries, MULTIPROCESSORS_OF_MANY))
    found = gemm.parts_partition(modules.epilogue.SWIGLU, 40, 992 * 2, 128, shrink_rows=rows)
    assert (found.partition.tile.columns, found.partition.split_k) == (96, 1)
    assert tiles > MULTIPROCESSORS_OF_MANY - found.parts * -(-rows // 96)
    check(fused_of(modules, libraries), on_device, shape, 40)


@pytest.mark.parametrize(("num_tokens", "num_launches"), [(33, 1), (150, 1), (1030, 2)])
def test_launches_of_a_product_are_made_once(modules, libraries, on_device, monkeypatch, num_tokens, num_launches):
    """Prompts wait for the host, and to make what launches are told was half of its time for such a product."""
    places: dict[Any, np.ndarray] = {}

    def pooled(shape: Any, dtype: Any) -> np.ndarray:
        """As CuPy's memory pool, whose arrays of one size lie where others were."""
        found = places.setdefault((shape, dtype), filled(shape, dtype))
        found.fill(np.nan)
        return found

    monkeypatch.setattr(sys.modules["cupy"], "empty", pooled)
    gemm = fused_of(modules, libraries)
    given, starts, _ = product(on_device, *MANY["Q, K and V"], num_tokens)
    first = gemm.linear(*given, starts=starts).copy()
    for _ in range(3):
        before = modules.maps.num_asked
        again = gemm.linear(*given, starts=starts)
        assert modules.maps.num_asked - before == 1 + num_launches, "only maps of X and of the weight are looked up"
        assert (again.view(np.uint16) == first.view(np.uint16)).all()


@pytest.mark.parametrize(("num_tokens", "fewer_tokens"), [(150, 40), (260, 210)])
def test_kept_launches_are_of_one_product_alone(modules, libraries, on_device, monkeypatch, num_tokens, fewer_tokens):
    """Products of which one thing is another each time, on one device and in turns; their arrays live side by side."""
    pools: list[dict[Any, np.ndarray]] = [{}, {}]  # as CuPy's memory pool: arrays lie where others were
    used: list[np.ndarray] = []

    def empty(shape: Any, dtype: Any) -> np.ndarray:
        memory = pools[0].setdefault((len(shape), dtype), filled((1 << 20,), dtype))
        used.append(memory[: math.prod(shape)].reshape(shape))
        used[-1].fill(np.nan)
        return used[-1]

    monkeypatch.setattr(sys.modules["cupy"], "empty", empty)
    given, starts, wanted = product(on_device, *MANY["Q, K and V"], num_tokens)
    x, weight, a, columns, slots = given
    less = slice(fewer_tokens)
    fewer = x[less], weight, a, columns, slots[less]  # first: more tokens than are known of would be zero
    cases = [(fewer, starts, wanted[less]), (given, starts, wanted)]
    none = np.full_like(slots, -1)
    cases.append(((x, weight, a, columns, none), starts, np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T))
    rng = np.random.default_rng(1)
    other_a, other_columns = (on_device(rng.permuted(np.asarray(each, np.float64), axis=-1)) for each in (a, columns))
    for changed in ((x, weight, other_a, columns, slots), (x, weight, a, other_columns, slots)):
        alone = fused_of(modules, libraries).linear(*changed, starts=starts)
        cases.append((changed, starts, alone.astype(np.float64)))
    shifted = (0, 128, 256, 320)
    cases.append((given, shifted, fused_of(modules, libraries).linear(*given, starts=shifted).astype(np.float64)))
    gemm = fused_of(modules, libraries)
    for _ in range(4):
        pools.reverse()
        for changed, begins, expected in cases:
            used.clear()
            assert distance(gemm.linear(*changed, starts=begins), expected) < 4e-3
            written = used if (changed[4] >= 0).any() else used[:1]  # parts are of tokens that have adapters
            assert not any(np.isnan(each.astype(np.float32)).all() for each in written), "A x is elsewhere"


def test_sums_over_a_are_made_in_every_way(modules, libraries):
    gemm = modules.gemm.Gemm(Device(libraries, MULTIPROCESSORS_OF_MANY))
    ways = set()
    for heights, inner, rank, num_slots in MANY.values():
        for epilogue in (modules.epilogue.STORE, modules.epilogue.SWIGLU):
            for num_tokens in OF_SEVERAL_TILES:
                rows = adapter_columns(num_slots, rank) * len(heights)
                found = gemm.adapted_partition(epilogue, num_tokens, sum(heights), inner, shrink_rows=rows)
                ways.add((found.shrinks, found.partition.split_k > 1, found.partition.multicast_ctas > 1))
    assert {(True, False, False), (True, True, False), (False, False, True)} <= ways


@pytest.mark.parametrize("num_tokens", [5, 40])
def test_without_adapters_a_product_is_what_it_is(modules, libraries, on_device, num_tokens):
    given, starts, _ = product(on_device, (192, 64, 64), 640, 16, 4, num_tokens)
    x, weight, a, columns, slots = given
    found = fused_of(modules, libraries).linear(x, weight, a, columns, np.full_like(slots, -1), starts=starts)
    assert distance(found, np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T) < 4e-3


@pytest.mark.parametrize(
    "mistake",
    [
        ("lora/decode_adapters.cuh", "int at = max(begin, 0) + four * 4;", "int at = four * 4;"),
        ("lora/decode_adapters.cuh", "mma(own, 0, lower.x, 0, lower.y, up.x, up.y);", ""),
        ("lora/decode_adapters.cuh", "piece += i < pieces && row >= starts[i];", ";"),
        ("lora/decode_adapters.cuh", "split < given.splits; split++, from", "split < 1; split++, from"),
        ("lora/decode_adapters.cuh", "is_last_served(&warps_served, warps)) parts_ready = 0;", "false) ;"),
        ("lora/decode_adapters.cuh", "column / 8 ^ row % 8;", "column / 8;"),
        ("lora/decode_adapters.cuh", "other(sum.z, sum.w);", "other(0, 0);"),
        ("gemm/decode_gemm.cuh", "adapters->piece_of(row) - adapters->piece_of(tile * S::kRows)", "0"),
        ("gemm/decode_gemm.cuh", "s.asked >> ((chunk - work.num_chunks) * lora::kDeltaSteps)", "s.asked"),
        ("gemm/decode_gemm.cuh", "                 tile * kSlices, once);", "                 0, once);"),
        ("gemm/decode_gemm.cuh", "      if (own >= work.num_chunks) return;", ""),
        ("gemm/decode_gemm.cuh", "s.w[stage][0] + product * kProductBytes,", "s.w[stage][0],"),
    ],
    ids=[
        "another slot's",
        "up's rows",
        "Q's piece for all",
        "one split",
        "counters stay",
        "rows as they are not swizzled",
        "half of four",
        "the first piece of a tile for all",
        "the first columns for all",
        "the first tile's rows",
        "X for B, too",
        "a tile's first rows of B for its last",
    ],
)
def test_mistakes_with_few_tokens_are_noticed(mistaken, on_device, mistake):
    names = "Q, K and V", "in a cluster", "slots of 8", "rank 24", "two steps a slot", "two chunks", "tiles of 80 rows"
    products = Products(on_device, tuple(SHAPES[name] for name in names), (5, 13))
    gemm = mistaken("decode", mistake, products)
    with pytest.raises(AssertionError):
        products.check(gemm)


@pytest.mark.parametrize(
    "mistake",
    [
        ("gemm/adapter_maps.cuh", "write(at, slot == of,", "write(at, true,"),
        ("gemm/adapter_maps.cuh", "token_values, lower_slot == of,", "token_values, slot == of,"),
        ("gemm/adapter_maps.cuh", "row % maps.pieces;\n      uint16_t", "0;\n      uint16_t"),
        ("gemm/gemm.cuh", "steps &= steps - 1;", "steps = 0;"),
        ("gemm/gemm.cuh", "if (!adapters || tile.is_shrink) return", "if (!adapters) return"),
        ("gemm/gemm.cuh", "work.blocks_with_adapters())) parts_ready = 0;", "work.blocks_with_adapters())) ;"),
        ("gemm/gemm.cuh", "(adapters->end_piece(end) - first_piece<S>(tile))", "1"),
        ("gemm/adapter_maps.cuh", "piece = first_piece + index", "piece = index"),
        ("gemm/gemm.cuh", "work.shrink_tiles * work.splits);", "work.shrink_tiles * work.splits + 1);"),
    ],
    ids=[
        "all slots'",
        "the first token's slot for its eighth",
        "Q's A for all",
        "one step of a chunk",
        "B's chunks of A",
        "counters stay",
        "one piece for all tiles",
        "the first pieces",
        "a part too many",
    ],
)
def test_mistakes_with_several_tiles_of_tokens_are_noticed(mistaken, on_device, mistake):
    products = Products(on_device, (MANY["Q, K and V"], MANY["K divided"]), (200, 260))
    gemm = mistaken("gemm", mistake, products)
    with pytest.raises(AssertionError):
        products.check(gemm)


def check_every_tile_of_prompts(modules: Any, libraries: Libraries, on_device: Any, *shapes: Any) -> None:
    """Of 530 tokens of runs, and of tokens that have one of all slots each."""
    for shape in shapes:
        check_every_tile(modules, libraries, on_device, shape)


def check_every_tile(modules: Any, libraries: Libraries, on_device: Any, shape: Any) -> None:
    chosen = modules.prompt_tiles.PROMPT_TILES
    try:
        for tile in {each for tiles in chosen.values() for each in tiles}:
            own = {epilogue: tuple(each for each in tiles if each == tile) for epilogue, tiles in chosen.items()}
            modules.prompt_tiles.PROMPT_TILES = own
            gemm = fused_of(modules, libraries)
            for are_prompts in (True, False):
                given, starts, wanted = product(on_device, *shape, 530, are_prompts=are_prompts)
                if own[modules.epilogue.STORE]:
                    assert distance(gemm.linear(*given, starts=starts), wanted) < 4e-3
                if len(starts) == 3 and own[modules.epilogue.SWIGLU]:
                    gate = gemm.linear_swiglu(*given, starts=starts)
                    assert distance(gate, gated(wanted, given[0].dtype)) < 1.5e-2
    finally:
        modules.prompt_tiles.PROMPT_TILES = chosen


@pytest.mark.parametrize("shape", MANY.values(), ids=MANY.keys())
def test_prompts_in_every_tile(modules, libraries, on_device, shape):
    check_every_tile_of_prompts(modules, libraries, on_device, shape)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("    return (__ffs(left) - 1) * kColumns;", "    return (__ffs(needed) - 1) * kColumns;"),
        ("first_piece + index / __popc(needed)", "first_piece"),
        ("piece * maps.columns + column, policy", "column, policy"),
        ("found |= words[i];", ";"),
        ("w + i * S::kColumns * (Steps::kBytes / 16), 1);", "w, 1);"),
        ("x + (i * S::kTokens + high * 64)", "x + (i * S::kTokens)"),
        ("warpgroup * S::kHigh * 64 * Steps::kBytes", "0"),
        ("return {needed, piece, __popc(needed) * pieces};", "return {needed, piece, pieces};"),
        ("kEpilogue == kSwiglu ? -piece : 0, tile.column_tile", "0, tile.column_tile"),
        ("const int stage = next_stage(own * ", "const int stage = next_stage(Steps::kOfStage * "),
    ],
    ids=[
        "the first step for all",
        "the first piece for all",
        "Q's A x for all",
        "what the first 64 tokens need",
        "the first step's B for all",
        "the first 64 tokens' A x",
        "the first warpgroup's A x",
        "one step",
        "gate's rows for up",
        "bytes that do not come",
    ],
)
def test_mistakes_with_prompts_are_noticed(modules, libraries, make_library, on_device, old, new):
    changed = libraries._replace(prompt=make_library(SOURCES["prompt"](PROMPT), ("gemm/gemm.cuh", old, new)))
    shapes = [MANY[name] for name in ("Q, K and V", "gate and up", "two chunks of B")]
    with pytest.raises(AssertionError):
        check_every_tile_of_prompts(modules, changed, on_device, *shapes)


@pytest.mark.parametrize(
    "mistake",
    [
        ("gemm/adapter_maps.cuh", "if (slot == of) *", "if (slot >= 0) *"),
        ("gemm/adapter_maps.cuh", "if (lower_slot == of)\n", "if (lower_slot >= 0 && slot == of)\n"),
        ("gemm/adapter_maps.cuh", "part < maps.parts,", "part < 1,"),
        ("gemm/adapter_maps.cuh", "(of ^ token % 8) * 16", "of * 16"),
        ("gemm/adapter_maps.cuh", "(slot * maps.rank - chunk.column) / 8", "slot * maps.rank / 8"),
        ("gemm/adapter_maps.cuh", "chunk.piece * maps.rank - first * 8", "-first * 8"),
        ("gemm/gemm.cuh", "work.part * work.splits + work.split, all", "work.part * work.splits, all"),
        ("gemm/gemm.cuh", "s.x[(stage + ahead + i) % S::kStages]", "s.x[(stage + i) % S::kStages]"),
        ("gemm/gemm.cuh", "if (are_there && threadIdx.x == 0) leave_shrunk(work);", ""),
        ("gemm/gemm.cuh", "(adapters->end_piece(end) - first_piece<S>(tile))", "1"),
    ],
    ids=[
        "all slots'",
        "the first token's slot for its eighth",
        "one part",
        "rows as they are not swizzled",
        "the first columns for all",
        "Q's A x for all",
        "parts that overlap",
        "where X still is",
        "counters stay",
        "one piece for all tiles",
    ],
)
def test_mistakes_with_one_tile_of_tokens_are_noticed(mistaken, on_device, mistake):
    shapes = tuple(MANY[name] for name in ("Q, K and V", "K divided", "two chunks of B"))
    products = Products(on_device, shapes, (33, 150))
    gemm = mistaken("one_tile", mistake, products)
    with pytest.raises(AssertionError):
        products.check(gemm)


PROMPTS = {
    "Q, K and V": (3, 1024, 16, 4),
    "one piece": (1, 640, 16, 4),
    "slots that share units": (1, 192, 8, 4),
    "pieces that share units": (2, 192, 8, 4),
    "rank 32": (2, 128, 32, 2),
    "as many as there may be": (3, 128, 16, 8),
    "rank 64": (3, 128, 64, 2),
    "one chunk": (1, 64, 16, 3),
}
"""Pieces, K, rank and slots."""
SLOTS_OF = {
    "runs": lambda tokens, slots: np.arange(tokens) * (slots + 1) // tokens - 1,
    "mixed": lambda tokens, slots: np.resize(np.array([slots - 1, -1, 0, 0, 1 % slots, slots, -3]), tokens),
    "one": lambda tokens, slots: np.full(tokens, slots - 1),
    "none": lambda tokens, slots: np.full(tokens, -1),
}


def shrunk(modules: Any, libraries: Libraries, on_device: Any, shape: Any, slots: np.ndarray) -> Any:
    """What the launch leaves, and what it should: `[T, P, E]`."""
    pieces, inner, rank, num_slots = shape
    num_tokens, columns = len(slots), adapter_columns(num_slots, rank)
    rng = np.random.default_rng(num_tokens)
    x = on_device(rng.normal(0, 1, (num_tokens, inner)))
    a = on_device(rng.normal(0, inner**-0.5, (num_slots, pieces, rank, inner)))
    out = np.full((num_tokens, pieces, columns), np.nan, x.dtype)
    steps = np.full(-(-num_tokens // 64), 1 << 31, np.uint32)
    wanted = np.zeros((num_tokens, pieces, columns))
    for token, slot in enumerate(slots):
        if 0 <= slot < num_slots:
            own = np.asarray(a[slot], np.float64) @ np.asarray(x[token], np.float64)
            wanted[token, :, slot * rank : (slot + 1) * rank] = own
    maps = modules.adapter_maps.AdapterMaps(
        slots=slots.ctypes.data, out=out.ctypes.data, pieces=pieces, columns=columns, rank=rank, steps=steps.ctypes.data
    )
    device = Device(libraries, MULTIPROCESSORS_OF_MANY)
    shrink = modules.prompt.PromptShrink(device)
    rows = shrink.rows_map(a.ctypes.data, num_slots * pieces * rank, inner)
    shrink.shrink(x, rows, maps, num_slots=num_slots)
    for tile, found in enumerate(steps):
        own = {slot for slot in slots[tile * 64 : (tile + 1) * 64] if 0 <= slot < num_slots}
        needed = {column // 16 for slot in own for column in range(slot * rank, (slot + 1) * rank)}
        assert found == sum(1 << step for step in needed)
    return out.astype(np.float64), wanted


@pytest.mark.parametrize("kind", SLOTS_OF)
@pytest.mark.parametrize("shape", PROMPTS.values(), ids=PROMPTS.keys())
def test_a_x_of_prompts_is_that_of_each_tokens_slot(modules, libraries, on_device, shape, kind):
    """Of one tile and a part of one, and of as many as run at a time."""
    for num_tokens in (64, 130, 530, 1290):
        slots = SLOTS_OF[kind](num_tokens, shape[3]).astype(np.int32)
        found, wanted = shrunk(modules, libraries, on_device, shape, slots)
        np.testing.assert_allclose(found, wanted, rtol=2**-8, atol=1e-4)
        assert (found[wanted == 0] == 0).all()


def test_blocks_divide_k_where_there_are_few_tokens(modules, libraries, on_device):
    PromptKernel.clusters.clear()
    for num_tokens in (64, 200, 330, 1280):
        slots = SLOTS_OF["runs"](num_tokens, 4).astype(np.int32)
        found, wanted = shrunk(modules, libraries, on_device, (1, 2112, 16, 4), slots)
        np.testing.assert_allclose(found, wanted, rtol=2**-8, atol=1e-4)
    assert PromptKernel.clusters == {1, 3, 5, 7}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("if (s.slots[own + 8] == of)", "if (s.slots[own] == of)"),
        ("row % rows / given.rank", "0"),
        ("(slot * rows + rows - 1) / unit + 1", "(slot * rows + rows) / unit"),
        ("(step / work.stages - 1) & 1", "(step / work.stages) & 1"),
        ("chunk + step);", "1);"),
        ("(1u << end) - (1u << begin)", "1u << begin"),
        ("(__ffs(left) - 1) * kRowsOfUnit, again", "0, again"),
        ("part &= part - 1;\n  return", ";\n  return"),
        ("block < 2 * __popc(part); block += work.splits", "block < 2; block += work.splits"),
        ("s.sums[block][threadIdx.x], split)", "s.sums[block][threadIdx.x], 0)"),
        ("group / own_groups == s.slots[token]", "group / own_groups <= s.slots[token]"),
        ("slot < given.num_slots ? max(slot, -1) : -1", "slot"),
    ],
    ids=[
        "the first token's slot for its eighth",
        "Q's A for all",
        "half a unit is none",
        "a stage that is in use",
        "sums that were there",
        "one unit of a slot",
        "the first unit for all",
        "the first row for all",
        "one unit is stored",
        "the first split's sums",
        "lower slots keep what was there",
        "slots that are not there",
    ],
)
def test_mistakes_in_a_x_of_prompts_are_noticed(modules, libraries, make_library, on_device, old, new):
    mistaken = make_library(SOURCES["prompt_shrink"](KERNELS["prompt_shrink"]), ("lora/prompt_shrink.cu", old, new))
    changed = libraries._replace(prompt_shrink=mistaken)
    wrong = 0
    for shape, kind in (
        ("Q, K and V", "mixed"),
        ("slots that share units", "runs"),
        ("as many as there may be", "mixed"),
    ):
        for num_tokens in (130, 530):
            slots = SLOTS_OF[kind](num_tokens, PROMPTS[shape][3]).astype(np.int32)
            try:
                found, wanted = shrunk(modules, changed, on_device, PROMPTS[shape], slots)
            except AssertionError:
                wrong += 1
                continue
            wrong += not (np.allclose(found, wanted, rtol=2**-8, atol=1e-4) and (found[wanted == 0] == 0).all())
    assert wrong
