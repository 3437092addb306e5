"""Gate and up of few tokens in tiles of 80 rows as the CUDA kernels multiply them, emulated, against float64."""

import ctypes
import importlib
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

KERNELS = [f"decode_gemm_swiglu_{tokens}{end}" for tokens in (8, 16) for end in ("", "_slices")]
SHARED = "extern __shared__ __align__(kAlignment) uint8_t raw[];"
CALLS = "".join(
    f'  if (!strcmp(kind, "{name}"))\n'
    f"    return run_clusters(blocks, 1, threads, [=] {{ {name}(*w, *x, static_cast<bf16*>(y), m, n, k); }});\n"
    for name in KERNELS
)
SOURCE = f"""#include "bfloat16.hpp"
#include "clusters.hpp"
#include "gemm/decode_gemm.cu"
using namespace emulated;
extern "C" __attribute__((visibility("default"))) int run(
    const char* kind, const CUtensorMap* w, const CUtensorMap* x, void* y, int m, int n, int k, int blocks,
    int threads) {{
{CALLS}  return kNoSuchKernel;
}}
"""


@pytest.fixture(scope="module")
def make_library(tmp_path_factory: pytest.TempPathFactory, emulation: Any) -> Callable[..., ctypes.CDLL]:
    """`mistake` is a text of the kernels' source and what stands in its place."""

    def make(mistake: tuple[str, str] | None = None) -> ctypes.CDLL:
        folder = emulation.sources(tmp_path_factory)
        text = (emulation.here / "cluster_hopper.cuh").read_text("utf-8")
        (folder / "csrc/common/hopper.cuh").write_text(text, "utf-8")
        (folder / "csrc/gemm/wgmma.cuh").write_text('#include "common/hopper.cuh"\n', "utf-8")
        for name in ("cuda_fp16.h", "cuda_bf16.h"):
            (folder / name).write_text('#include "bfloat16.hpp"\n', "utf-8")
        path = folder / "csrc/gemm/decode_gemm.cuh"
        text = path.read_text("utf-8")
        for old, new in [(SHARED, "uint8_t* raw = emulated::shared_memory();"), *([mistake] if mistake else [])]:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        path.write_text(text, "utf-8")
        return ctypes.CDLL(str(emulation.build(folder, "decode", SOURCE)))

    return make


@pytest.fixture(scope="module")
def module(emulation: Any) -> Iterator[Any]:
    class TensorMaps:
        """`CUtensorMap` as `cluster_hopper.cuh` reads it."""

        def of(self, tensor: Any) -> Any:
            is_plane = len(tensor.sizes) == 2
            words = (*tensor.sizes, tensor.box[1]) if is_plane else (*tensor.sizes, *tensor.strides_bytes, *tensor.box)
            return emulation.tensor_map((tensor.address, *words))

    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cupy", SimpleNamespace(ndarray=np.ndarray))
        patch.setitem(sys.modules, "cuda.bindings.driver", MagicMock())
        arrays = importlib.import_module("openinfer_kernels.cuda.common.arrays")
        maps = importlib.import_module("openinfer_kernels.cuda.common.tensor_maps")
        patch.setattr(arrays, "address", lambda array: array.ctypes.data)
        patch.setattr(maps, "TensorMaps", TensorMaps)
        yield importlib.import_module("openinfer_kernels.cuda.gemm.decode_gemm")
    for name in set(sys.modules) - before:
        if name.startswith("openinfer_kernels.cuda"):
            del sys.modules[name]


class Device:
    num_multiprocessors = 3

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self.launched: list[tuple[str, int]] = []

    def has(self, stem: str) -> bool:
        return True

    def kernel(self, stem: str, name: str, *, shared_bytes: int) -> Callable[..., None]:
        def launch(grid: Any, block: Any, arguments: list[Any], *, overlap: bool, cluster: int) -> None:
            w, x, out, *numbers = arguments
            assert cluster == 1
            self.launched.append((name, grid[0]))
            place = ctypes.c_void_p(out.ctypes.data)
            outcome = self._library.run(
                name.encode(), ctypes.byref(w), ctypes.byref(x), place, *numbers, grid[0], block[0]
            )
            assert outcome == 0, (name, outcome)

        return launch


def gated(module: Any, library: ctypes.CDLL, on_device: Any, rows: int, num_tokens: int) -> tuple[float, Device]:
    """How far it is from float64, of its length; one more token is no one's."""
    rng = np.random.default_rng(rows + num_tokens)
    x, weight = on_device(rng.standard_normal((num_tokens, 256))), on_device(rng.standard_normal((rows, 256)) / 16)
    gate, up = np.split(x.astype(np.float64) @ weight.astype(np.float64).T, 2, axis=1)
    gate, up = (half.astype(x.dtype).astype(np.float64) for half in (gate, up))
    wanted = gate / (1 + np.exp(-gate)) * up
    out, device = np.full((num_tokens + 1, rows // 2), np.nan, x.dtype), Device(library)
    module.DecodeGemm(device).linear_swiglu(x, weight, out[:num_tokens])
    assert np.isnan(out[num_tokens].astype(np.float32)).all()
    return float(np.linalg.norm(out[:num_tokens].astype(np.float64) - wanted) / np.linalg.norm(wanted)), device


# Six blocks run at a time on three multiprocessors: 448 rows are 28 slices of 16, of which the last block has three.
@pytest.mark.parametrize("num_tokens", [1, 8, 9, 16])
@pytest.mark.parametrize(("rows", "kernel"), [(448, "slices"), (384, ""), (576, "")])
def test_each_block_has_one_tile_of_80_rows_where_all_run_at_a_time(
    module, make_library, on_device, library, rows, kernel, num_tokens
):
    error, device = gated(module, library, on_device, rows, num_tokens)
    assert error < 1e-2
    tokens = 8 if num_tokens <= 8 else 16
    (launched,) = device.launched
    assert launched[0] == f"decode_gemm_swiglu_{tokens}" + ("_slices" if kernel else "")
    if kernel:
        assert launched[1] == 6


@pytest.fixture(scope="module")
def library(make_library: Callable[..., ctypes.CDLL]) -> ctypes.CDLL:
    return make_library()


@pytest.mark.parametrize(
    "mistake",
    [
        ("w + step * 2 + product * kProductBytes / 16", "w + step * 2"),
        ("tile * kSlices + product * kProductSlices, end_slice", "tile * kSlices, end_slice"),
        ("0, 0, tile * kSlices, policy", "0, 0, tile * kProductSlices, policy"),
    ],
    ids=["rows of the first product", "stored where the first product is", "rows of tiles of 64"],
)
def test_mistakes_in_the_second_product_are_noticed(module, make_library, on_device, mistake):
    error, _ = gated(module, make_library(mistake), on_device, 448, 5)
    assert not error < 0.1
