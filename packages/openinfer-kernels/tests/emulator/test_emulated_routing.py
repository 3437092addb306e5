"""Routers as the CUDA kernel chooses and weighs, emulated, against the CPU's operator: also with a shared expert."""

import ctypes
import importlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from openinfer_kernels import ArrayMismatchError, GroupScore, Routing, Scoring
from openinfer_kernels.cpu import CpuOps

SOURCE = """#include "fibers.hpp"
#undef __shared__
#define __shared__ static
using std::isnan;
#include "moe/routing.cu"
using namespace emulated;
extern "C" __attribute__((visibility("default"))) int run(
    const char* kind, const float* logits, const float* bias, const int* token_ids, const int* table,
    const int64_t* slots, int* ids, float* weights, const Routing* routing, size_t bytes, int blocks, int threads) {
  if (bytes != sizeof(Routing)) return kOtherArguments;
  auto* function = !strcmp(kind, "route_64") ? route_64 : !strcmp(kind, "route_384") ? route_384 : route_256;
  return run_grid(blocks, threads,
                  [&] { function(logits, bias, token_ids, table, slots, ids, weights, *routing); });
}
"""
SMALL = Routing(scoring=Scoring.SOFTMAX, num_experts=8, num_experts_per_token=2, normalised=True)
QWEN35 = Routing(scoring=Scoring.SOFTMAX, num_experts=256, num_experts_per_token=8, normalised=True, shared_expert=True)
GROUPS = Routing(
    scoring=Scoring.SIGMOID,
    num_experts=24,
    num_experts_per_token=5,
    num_groups=6,
    num_kept_groups=3,
    group_score=GroupScore.TOP_TWO_SUM,
    normalised=True,
    scale=2.5,
    shared_expert=True,
)
KIMI = Routing(scoring=Scoring.SIGMOID, num_experts=384, num_experts_per_token=8, normalised=True, scale=2.827)


class Kernel:
    """As `openinfer_kernels.cuda.common.launch.Kernel` is called."""

    def __init__(self, library: ctypes.CDLL, kind: str) -> None:
        self._run, self._kind = library.run, kind.encode()

    def __call__(self, grid: Any, block: Any, arguments: list[Any], *, overlap: bool) -> None:
        *arrays, routing = arguments
        pointers = [None if each is None else ctypes.c_void_p(each.ctypes.data) for each in arrays]
        size = ctypes.c_size_t(ctypes.sizeof(routing))
        assert self._run(self._kind, *pointers, ctypes.byref(routing), size, grid[0], block[0]) == 0


@pytest.fixture(scope="module")
def router(compile_emulated: Any) -> Iterator[Any]:
    """`Router` over arrays of NumPy."""
    library = ctypes.CDLL(str(compile_emulated("routing", SOURCE)))
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cupy", SimpleNamespace(ndarray=np.ndarray, empty=filled))
        patch.setitem(sys.modules, "cuda.bindings.driver", MagicMock())
        routing = importlib.import_module("openinfer_kernels.cuda.moe.routing")
        yield routing.Router(SimpleNamespace(kernel=lambda stem, name: Kernel(library, name)))
    for name in set(sys.modules) - before:
        if name.startswith("openinfer_kernels.cuda"):
            del sys.modules[name]


def filled(shape: Any, dtype: Any) -> np.ndarray:
    """What no kernel writes is seen."""
    return np.full(shape, 77, dtype)


@pytest.mark.parametrize("routing", [SMALL, QWEN35, GROUPS, KIMI], ids=["8", "256 shared", "groups", "384"])
@pytest.mark.parametrize("further_columns", [0, 63])
def test_choice_is_the_cpus(router: Any, routing: Routing, further_columns: int) -> None:
    rng = np.random.default_rng(routing.num_experts)
    columns = routing.num_experts + routing.shared_expert + further_columns
    logits = rng.normal(0, 2, (11, columns)).astype(np.float32)
    logits[6] = np.nan
    slots = np.arange(11, dtype=np.int64)
    slots[3] = -1
    choice = router.top_experts(logits, routing=routing, cache_slots=slots)
    expected = CpuOps.top_experts(logits, routing=routing, cache_slots=slots)
    tokens = [token for token in range(11) if token != 6]
    np.testing.assert_array_equal(choice.ids[tokens], expected.ids[tokens])
    np.testing.assert_allclose(choice.weights[tokens], expected.weights[tokens], rtol=1e-5)
    assert choice.ids.shape == (11, routing.num_experts_per_token + routing.shared_expert)
    assert choice.num_experts == expected.num_experts
    assert ((choice.ids[6] >= 0) & (choice.ids[6] < columns)).all()
    assert np.isnan(choice.weights[6]).all()
    assert choice.ids[3].tolist() == [-1] * choice.ids.shape[1]


def test_too_few_columns_are_refused(router: Any) -> None:
    with pytest.raises(ArrayMismatchError, match="are not those of 256 experts"):
        router.top_experts(np.zeros((1, 256), np.float32), routing=QWEN35)
