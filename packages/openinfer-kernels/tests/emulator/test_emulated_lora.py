"""Low-rank adapters as the CUDA kernels add them, emulated, against the CPU's operators."""

import ctypes
import importlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from openinfer_kernels import ArrayMismatchError
from openinfer_kernels.cpu import CpuOps

SOURCE = """#include "fibers.hpp"
#undef __shared__
#define __shared__ static
using std::fmaf;
#include "lora/lora.cu"
using namespace emulated;
extern "C" __attribute__((visibility("default"))) int run(
    const char* kind, const void* given, size_t bytes, int blocks, int threads) {
  if (!strcmp(kind, "lora_shrink")) return launch(lora_shrink, nullptr, given, bytes, blocks, threads);
  return launch(lora_expand, nullptr, given, bytes, blocks, threads);
}
"""


class Kernel:
    """As `openinfer_kernels.cuda.common.launch.Kernel` is called."""

    def __init__(self, library: ctypes.CDLL, kind: str) -> None:
        self._run, self._kind = library.run, kind.encode()

    def __call__(self, grid: Any, block: Any, arguments: list[Any], *, overlap: bool) -> None:
        (given,) = arguments
        size = ctypes.c_size_t(ctypes.sizeof(given))
        assert self._run(self._kind, ctypes.byref(given), size, grid[0], block[0]) == 0


@pytest.fixture(scope="module")
def lora(compile_emulated: Any) -> Iterator[Any]:
    """`Lora` over arrays of NumPy."""
    library = ctypes.CDLL(str(compile_emulated("lora", SOURCE)))
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cupy", SimpleNamespace(ndarray=np.ndarray, empty=filled))
        patch.setitem(sys.modules, "cuda.bindings.driver", MagicMock())
        arrays = importlib.import_module("openinfer_kernels.cuda.common.arrays")
        patch.setattr(arrays, "address", lambda array: array.ctypes.data)
        module = importlib.import_module("openinfer_kernels.cuda.lora.lora")
        yield module.Lora(SimpleNamespace(kernel=lambda stem, name: Kernel(library, name)))
    for name in set(sys.modules) - before:
        if name.startswith("openinfer_kernels.cuda"):
            del sys.modules[name]


def filled(shape: Any, dtype: Any) -> np.ndarray:
    """What no kernel writes is seen."""
    return np.full(shape, np.nan, dtype)


def product(rng: np.random.Generator, on_device: Any, *, inner: int, heights: tuple[int, ...], rank: int) -> Any:
    """x, y, A, B and starts of a product of seven tokens and three slots."""
    draw = lambda *shape: on_device(rng.normal(0, 0.5, shape))  # noqa: E731
    starts = (0, *np.cumsum(heights).tolist())
    return (
        draw(7, inner),
        draw(7, starts[-1]),
        draw(3, len(heights), rank, inner),
        draw(3, starts[-1], rank),
        starts,
    )


SLOTS = np.array([2, -1, 0, 0, -1, 1, 2], np.int32)
SHAPES = [
    {"inner": 96, "heights": (192, 64, 64), "rank": 8},
    {"inner": 37, "heights": (300,), "rank": 16},
    {"inner": 520, "heights": (33, 290), "rank": 512},
    {"inner": 8, "heights": (1, 2, 3, 4), "rank": 8},
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape['heights']} of rank {shape['rank']}")
def test_kernels_add_what_the_cpu_adds(lora: Any, on_device: Any, shape: Any) -> None:
    x, y, a, b, starts = product(np.random.default_rng(shape["rank"]), on_device, **shape)
    shrunk = lora.lora_shrink(x, a, SLOTS)
    wide = [np.asarray(each, np.float32) for each in (x, y, a, b)]
    expected_shrunk = CpuOps.lora_shrink(wide[0], wide[2], SLOTS)
    np.testing.assert_allclose(shrunk, expected_shrunk, rtol=1e-4, atol=1e-3)
    expected, before = wide[1].copy(), y.copy()
    CpuOps.lora_expand(expected, shrunk, wide[3], SLOTS, starts=starts)
    lora.lora_expand(y, shrunk, b, SLOTS, starts=starts)
    np.testing.assert_allclose(np.asarray(y, np.float32), expected, rtol=2**-7, atol=1e-2)
    none = SLOTS < 0
    assert (y[none] == before[none]).all()
    assert not shrunk[none].any()
    assert (y[~none] != before[~none]).mean() > 0.5


def test_token_is_the_same_alone_and_among_others(lora: Any, on_device: Any) -> None:
    x, y, a, b, starts = product(np.random.default_rng(3), on_device, inner=96, heights=(80, 24), rank=16)
    together = y.copy()
    lora.lora_expand(together, lora.lora_shrink(x, a, SLOTS), b, SLOTS, starts=starts)
    for token in range(len(SLOTS)):
        alone, slots = on_device(np.asarray(y[token : token + 1])), SLOTS[token : token + 1].copy()
        lora.lora_expand(alone, lora.lora_shrink(on_device(x[token : token + 1]), a, slots), b, slots, starts=starts)
        assert alone.tobytes() == together[token].tobytes()


def test_rows_of_no_piece_stay(lora: Any, on_device: Any) -> None:
    x, y, a, b, _ = product(np.random.default_rng(4), on_device, inner=16, heights=(20, 20), rank=8)
    before = y.copy()
    lora.lora_expand(y, lora.lora_shrink(x, a, SLOTS), b, SLOTS, starts=(4, 20, 31))
    assert (y[:, :4] == before[:, :4]).all()
    assert (y[:, 31:] == before[:, 31:]).all()
    assert (y[0, 4:31] != before[0, 4:31]).any()


def test_slot_beyond_the_arena_changes_nothing(lora: Any, on_device: Any) -> None:
    x, y, a, b, starts = product(np.random.default_rng(5), on_device, inner=16, heights=(8,), rank=8)
    slots, before = np.full(7, 3, np.int32), y.copy()
    lora.lora_expand(y, lora.lora_shrink(x, a, slots), b, slots, starts=starts)
    assert (y == before).all()


@pytest.mark.parametrize("starts", [(0, 8, 4), (0, 8), (-1, 4, 8), (0, 4, 9)])
def test_other_pieces_are_refused(lora: Any, on_device: Any, starts: Any) -> None:
    x, y, a, b, _ = product(np.random.default_rng(6), on_device, inner=16, heights=(4, 4), rank=8)
    with pytest.raises(ArrayMismatchError, match="are not those of 2 pieces"):
        lora.lora_expand(y, lora.lora_shrink(x, a, SLOTS), b, SLOTS, starts=starts)
