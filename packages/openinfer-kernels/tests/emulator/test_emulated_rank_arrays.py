"""Sums over ranks on several nodes, emulated: each node's ranks first, then the nodes, rounded once."""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

SOURCE = """#include "fibers.hpp"
struct __nv_bfloat162 { __nv_bfloat16 x, y; };
inline float2 __bfloat1622float2(__nv_bfloat162) { return {}; }
inline float __bfloat162float(__nv_bfloat16) { return 0; }
inline float __fdividef(float a, float b) { return a / b; }
inline __nv_bfloat16 __float2bfloat16_rn(float) { return {}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float, float) { return {}; }
#include "comm/rank_arrays.cu"
using namespace emulated;
extern "C" __attribute__((visibility("default"))) int run(
    const float* ranks, float* out, int64_t count, int size, unsigned long long starts, int blocks, int threads) {
  return run_grid(blocks, threads, [&] { sum_over_nodes_float32(ranks, out, count, size, starts); });
}
"""
LAYOUTS = [(4,), (1, 1, 1, 1), (2, 2), (1, 3), (3, 2, 1)]


@pytest.fixture(scope="module")
def library(compile_emulated: Any) -> ctypes.CDLL:
    return ctypes.CDLL(str(compile_emulated("rank_arrays", SOURCE)))


def by_hand(ranks: np.ndarray, node_counts: Sequence[int]) -> np.ndarray:
    sums, begin = list[np.ndarray](), 0
    for count in node_counts:
        total = ranks[begin].copy()
        for each in ranks[begin + 1 : begin + count]:
            total = total + each
        sums.append(total)
        begin += count
    total = sums[0]
    for each in sums[1:]:
        total = total + each
    return total


@pytest.mark.parametrize("node_counts", LAYOUTS)
def test_sums_have_the_bits_of_their_layout(library: ctypes.CDLL, node_counts: tuple[int, ...]) -> None:
    size, count = sum(node_counts), 300
    generator = np.random.default_rng(size)
    ranks = (generator.normal(size=(size, count)) * 10.0 ** generator.integers(-4, 5, (size, 1))).astype(np.float32)
    ranks[:, :5] = -0.0
    out = np.full(count, 7, np.float32)
    begins = np.cumsum([0, *node_counts[:-1]])
    starts = ctypes.c_ulonglong(int(sum(1 << int(begin) for begin in begins)))
    pointers = [ctypes.c_void_p(each.ctypes.data) for each in (ranks, out)]
    assert library.run(*pointers, ctypes.c_int64(count), size, starts, 2, 256) == 0
    expected = by_hand(ranks, node_counts)
    np.testing.assert_array_equal(out.view(np.uint32), expected.view(np.uint32))
