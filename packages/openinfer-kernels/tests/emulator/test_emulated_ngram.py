"""Looked up drafts as the CUDA kernel finds them, emulated, against the CPU's operator, over sequences that grow."""

import ctypes
import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from openinfer_kernels import ArrayMismatchError, NgramHistory, NgramMatch, NgramRule
from openinfer_kernels.cpu import CpuOps

SOURCE = """#include "fibers.hpp"
#undef __shared__
#define __shared__ static
#include "sampling/ngram.cu"
using namespace emulated;
extern "C" __attribute__((visibility("default"))) int run(
    const History* history, size_t history_bytes, const Rule* rule, size_t rule_bytes, const int* slots,
    const int* last_ids, const int* lengths, int* drafts, int blocks, int threads) {
  if (history_bytes != sizeof(History) || rule_bytes != sizeof(Rule)) return kOtherArguments;
  return run_grid(blocks, threads, [&] { ngram_drafts(*history, *rule, slots, last_ids, lengths, drafts); });
}
"""
SLOTS, WIDTH, K = 6, 700, 5
RULE = NgramRule(n_min=2, n_max=4, reference_n_max=32, match=NgramMatch.EARLIEST, max_tokens=600)


class Kernel:
    """As `openinfer_kernels.cuda.common.launch.Kernel` is called."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._run = library.run

    def __call__(self, grid: Any, block: Any, arguments: list[Any]) -> None:
        history, rule, *arrays = arguments
        structures = []
        for each in (history, rule):
            structures += [ctypes.byref(each), ctypes.c_size_t(ctypes.sizeof(each))]
        pointers = [ctypes.c_void_p(each.ctypes.data) for each in arrays]
        assert self._run(*structures, *pointers, grid[0], block[0]) == 0


@pytest.fixture(scope="module")
def lookup(compile_emulated: Any) -> Iterator[Any]:
    """`NgramDrafts` over arrays of NumPy."""
    library = ctypes.CDLL(str(compile_emulated("ngram", SOURCE)))
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        empty = SimpleNamespace(ndarray=np.ndarray, empty=lambda shape, dtype: np.full(shape, 77, dtype))
        patch.setitem(sys.modules, "cupy", empty)
        patch.setitem(sys.modules, "cuda.bindings.driver", MagicMock())
        arrays = importlib.import_module("openinfer_kernels.cuda.common.arrays")
        patch.setattr(arrays, "address", lambda array: array.ctypes.data)
        ngram = importlib.import_module("openinfer_kernels.cuda.sampling.ngram")
        yield ngram.NgramDrafts(SimpleNamespace(kernel=lambda stem, name: Kernel(library)))
    for name in set(sys.modules) - before:
        if name.startswith("openinfer_kernels.cuda"):
            del sys.modules[name]


def make_history(rng: np.random.Generator) -> NgramHistory:
    """Slots with prompts of few different ids, every other one with a reference."""
    known = rng.integers(1, 400, SLOTS).astype(np.int32)
    references = (np.arange(SLOTS) % 2 * rng.integers(1, 90, SLOTS)).astype(np.int32)
    ids = rng.integers(0, 4, (SLOTS, WIDTH)).astype(np.int32)
    ids[np.arange(WIDTH) >= (known + references)[:, None]] = -1
    return NgramHistory(ids=ids, known=known, references=references, drafts=np.full((SLOTS, K), -1, np.int32))


def copied(history: NgramHistory) -> NgramHistory:
    names = ("ids", "known", "references", "drafts")
    return replace(history, **{name: getattr(history, name).copy() for name in names})


@pytest.mark.parametrize("match", list(NgramMatch))
def test_drafts_are_the_cpus_step_after_step(lookup: Any, match: NgramMatch) -> None:
    rng = np.random.default_rng(4)
    rule, num_drafts = replace(RULE, match=match), 0
    own = make_history(rng)
    expected = copied(own)
    for _ in range(25):
        slots = rng.permutation(SLOTS)[: rng.integers(1, SLOTS + 1)].astype(np.int32)
        last_ids = rng.integers(0, 4, len(slots)).astype(np.int32)
        lengths = (own.known[slots] + rng.integers(0, K + 3, len(slots))).astype(np.int32)
        lengths[rng.random(len(slots)) < 0.05] = WIDTH + 1
        found = lookup.ngram_drafts(own, slots, last_ids, lengths, rule=rule)
        wanted = CpuOps.ngram_drafts(expected, slots, last_ids, lengths, rule=rule)
        np.testing.assert_array_equal(found, wanted)
        for name in ("ids", "known", "references", "drafts"):
            np.testing.assert_array_equal(getattr(own, name), getattr(expected, name))
        num_drafts += int((wanted >= 0).sum())
    assert num_drafts > 100


def test_what_the_kernel_cannot_read_is_refused(lookup: Any) -> None:
    history, rows = make_history(np.random.default_rng(0)), np.zeros(2, np.int32)
    with pytest.raises(ArrayMismatchError, match="2 slots, 1 last ids"):
        lookup.ngram_drafts(history, rows, rows[:1], rows, rule=RULE)
    with pytest.raises(ArrayMismatchError, match="n-grams of"):
        lookup.ngram_drafts(history, rows, rows, rows, rule=replace(RULE, n_max=64))
    with pytest.raises(ArrayMismatchError, match="as many slots"):
        lookup.ngram_drafts(replace(history, known=rows), rows, rows, rows, rule=RULE)
    with pytest.raises(ArrayMismatchError, match="the lengths must be"):
        lookup.ngram_drafts(history, rows, rows, rows.astype(np.int64), rule=RULE)
