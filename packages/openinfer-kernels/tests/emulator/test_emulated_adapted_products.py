"""Products with adapters in one launch as the CUDA kernels compute them, clusters and all, emulated, against float64."""

import ctypes
import importlib
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from openinfer_kernels.weights.adapter_columns import adapter_columns

MULTIPROCESSORS = 6
DECODE = [f"adapted_decode_gemm_{epilogue}_{tokens}" for epilogue in ("store", "swiglu") for tokens in (8, 16, 32)]
SHARED = "extern __shared__ __align__(kAlignment) uint8_t raw[];"
CALLS = "".join(
    f'  if (!strcmp(kind, "{name}")) return run_clusters(blocks, cluster, threads, [=] {{\n'
    f"    {name}(*w, *x, static_cast<bf16*>(y), m, n, k, *adapters); }});\n"
    for name in DECODE
)
SOURCE = f"""#include "bfloat16.hpp"
#include "clusters.hpp"
#include "lora/adapted_decode_gemm.cu"
using namespace emulated;
extern "C" __attribute__((visibility("default"))) int run(
    const char* kind, const CUtensorMap* w, const CUtensorMap* x, void* y, int m, int n, int k,
    const lora::DecodeAdapters* adapters, size_t bytes, int blocks, int cluster, int threads) {{
  if (bytes != sizeof(lora::DecodeAdapters)) return kOtherArguments;
{CALLS}  return kNoSuchKernel;
}}
extern "C" __attribute__((visibility("default"))) unsigned left() {{ return lora::parts_ready + lora::warps_served; }}
"""


class Kernel:
    """As `openinfer_kernels.cuda.common.launch.Kernel` is called."""

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        self._library, self._name = library, name

    def __call__(self, grid: Any, block: Any, arguments: list[Any], *, overlap: bool, cluster: int) -> None:
        w, x, out, m, n, k, adapters = arguments
        maps = ctypes.byref(w), ctypes.byref(x), ctypes.c_void_p(out.ctypes.data)
        sizes = ctypes.c_size_t(ctypes.sizeof(adapters)), grid[0], cluster, block[0]
        given = *maps, m, n, k, ctypes.byref(adapters), *sizes
        outcome = self._library.run(self._name.encode(), *given)
        assert outcome == 0, (self._name, outcome)
        assert self._library.left() == 0, "counters are left as they were found"


@pytest.fixture(scope="module")
def make_library(tmp_path_factory: pytest.TempPathFactory, emulation: Any) -> Callable[..., ctypes.CDLL]:
    """Of the kernels; `mistake` is a text of a source and what stands in its place."""

    def make(mistake: tuple[str, str, str] | None = None) -> ctypes.CDLL:
        folder = emulation.sources(tmp_path_factory)
        text = (emulation.here / "cluster_hopper.cuh").read_text("utf-8")
        (folder / "csrc/common/hopper.cuh").write_text(text, "utf-8")
        for name in ("cuda_fp16.h", "cuda_bf16.h"):
            (folder / name).write_text('#include "bfloat16.hpp"\n', "utf-8")
        changes = [("gemm/decode_gemm.cuh", SHARED, "uint8_t* raw = emulated::shared_memory();")]
        for name, old, new in [*changes, *([mistake] if mistake else [])]:
            path = folder / "csrc" / name
            text = path.read_text("utf-8")
            assert text.count(old) == 1, old
            path.write_text(text.replace(old, new), "utf-8")
        return ctypes.CDLL(str(emulation.build(folder, "adapted", SOURCE)))

    return make


@pytest.fixture(scope="module")
def library(make_library: Callable[..., ctypes.CDLL]) -> ctypes.CDLL:
    return make_library()


@pytest.fixture(scope="module")
def modules(emulation: Any) -> Iterator[SimpleNamespace]:
    """Those of the products, over arrays of NumPy."""

    class TensorMaps:
        """`CUtensorMap` as `cluster_hopper.cuh` reads it."""

        def of(self, tensor: Any) -> Any:
            assert tensor.box[0] == 64
            if len(tensor.sizes) == 2:
                return emulation.tensor_map((tensor.address, *tensor.sizes, tensor.box[1]))
            return emulation.tensor_map((tensor.address, *tensor.sizes, *tensor.strides_bytes, *tensor.box))

    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cupy", SimpleNamespace(ndarray=np.ndarray, empty=filled))
        patch.setitem(sys.modules, "cuda.bindings.driver", MagicMock())
        arrays = importlib.import_module("openinfer_kernels.cuda.common.arrays")
        maps = importlib.import_module("openinfer_kernels.cuda.common.tensor_maps")
        patch.setattr(arrays, "address", lambda array: array.ctypes.data)
        patch.setattr(maps, "TensorMaps", TensorMaps)
        yield SimpleNamespace(
            decode=importlib.import_module("openinfer_kernels.cuda.gemm.decode_gemm"),
            fused=importlib.import_module("openinfer_kernels.cuda.lora.adapted_gemm"),
        )
    for name in set(sys.modules) - before:
        if name.startswith("openinfer_kernels.cuda"):
            del sys.modules[name]


def filled(shape: Any, dtype: Any) -> np.ndarray:
    """What no kernel writes is seen."""
    return np.full(shape, np.nan, dtype)


class Device:
    """As much of one as the products ask for."""

    num_multiprocessors = MULTIPROCESSORS

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def has(self, stem: str) -> bool:
        return True

    def kernel(self, stem: str, name: str, *, shared_bytes: int = 0) -> Kernel:
        return Kernel(self._library, name)


def product(on_device: Any, heights: tuple[int, ...], inner: int, rank: int, num_slots: int, num_tokens: int) -> Any:
    """x, the weight, A, the columns of B, slots and starts; and what the product is in float64."""
    rng = np.random.default_rng(num_tokens)
    starts = (0, *np.cumsum(heights).tolist())
    draw = lambda *shape: on_device(rng.normal(0, shape[-1] ** -0.5, shape))  # noqa: E731
    x, weight = on_device(rng.normal(0, 1, (num_tokens, inner))), draw(starts[-1], inner)
    a, b = draw(num_slots, len(heights), rank, inner), draw(num_slots, starts[-1], rank)
    columns = on_device(np.zeros((starts[-1], adapter_columns(num_slots, rank))))
    columns.reshape(starts[-1], -1, rank)[:, :num_slots] = b.transpose(1, 0, 2)
    slots = np.resize(np.array([num_slots - 1, -1, 0, 0, 1 % num_slots, num_slots], np.int32), num_tokens)
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
    "slots of 8": ((80, 16, 32), 256, 8, 3),
    "rank 24": ((512, 512), 128, 24, 3),
    "one large slot": ((64,), 5248, 64, 1),
    "two steps a slot": ((832,), 128, 32, 4),
}


def decode_of(modules: Any, library: ctypes.CDLL) -> Any:
    device = Device(library)
    return modules.fused.AdaptedGemm(device, modules.decode.DecodeGemm(device), None)


@pytest.mark.parametrize("num_tokens", [1, 5, 13, 31])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_few_tokens_have_what_their_adapters_add(modules, library, on_device, shape, num_tokens):
    given, starts, wanted = product(on_device, *shape, num_tokens)
    gemm = decode_of(modules, library)
    found = [gemm.linear(*given, starts=starts) for _ in range(2)]
    assert (found[0].view(np.uint16) == found[1].view(np.uint16)).all()
    assert distance(found[0], wanted) < 4e-3
    np.testing.assert_allclose(found[0].astype(np.float64), wanted, atol=2e-2 * np.abs(wanted).max())
    if len(starts) == 3:
        gate = gemm.linear_swiglu(*given, starts=starts)
        assert distance(gate, gated(wanted, given[0].dtype)) < 1.5e-2


def test_without_adapters_a_product_is_what_it_is(modules, library, on_device):
    given, starts, _ = product(on_device, (192, 64, 64), 640, 16, 4, 5)
    x, weight, a, columns, slots = given
    found = decode_of(modules, library).linear(x, weight, a, columns, np.full_like(slots, -1), starts=starts)
    assert distance(found, np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T) < 4e-3


@pytest.mark.parametrize(
    "mistake",
    [
        ("lora/decode_adapters.cuh", "const Halves one(is_own ? sums[i].x : 0.0f,", "const Halves one(sums[i].x,"),
        ("lora/decode_adapters.cuh", "const int lower = upper + (kGated ? n / 2 : 8);", "const int lower = upper + 8;"),
        ("lora/decode_adapters.cuh", "piece += i < given.pieces && row >= given.starts[i];", ""),
        ("lora/decode_adapters.cuh", "split < given.splits; split++, from", "split < 1; split++, from"),
        ("lora/decode_adapters.cuh", " parts_ready = 0, warps_served = 0;", " warps_served = 0;"),
        ("gemm/decode_gemm.cuh", "      delta.load(given, tile, n);\n  }", "      ;\n  }"),
    ],
    ids=["another slot's", "up's rows", "Q's piece for all", "one split", "counters stay", "the first tile's rows"],
)
def test_mistakes_of_the_kernels_are_noticed(modules, make_library, on_device, mistake):
    library = make_library(mistake)
    with pytest.raises(AssertionError):
        for name in ("Q, K and V", "in a cluster", "rank 24", "two steps a slot"):
            for num_tokens in (5, 13):
                test_few_tokens_have_what_their_adapters_add(modules, library, on_device, SHAPES[name], num_tokens)
