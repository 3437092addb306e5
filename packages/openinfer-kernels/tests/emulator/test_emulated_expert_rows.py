"""Rows on their way to other ranks' experts and back, emulated: two and three ranks at once, each a library of its own.

A rank's kernels run on a thread while the other ranks' do, so that each waits for what the others send. What is not
seen here: the order in which writes over NVLink arrive, and blocks that run side by side.
"""

import ctypes
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

WIDTH, CHOSEN, EXPERTS, MOST_PLACES, MOST_BLOCKS = 48, 5, 4, 6, 4
SOURCE = """#include "fibers.hpp"
#include <sched.h>
#undef __shared__
#define __shared__ static
#include "comm/expert_rows.cu"
using namespace emulated;
#define EXPORT extern "C" __attribute__((visibility("default"))) int
EXPORT dispatch(const void* x, const void* ids, const void* weights, const void* shared, void* all_x, void* all_ids,
                void* all_weights, void* all_shared, const Group* group, const Sizes* sizes, int blocks) {
  return run_grid(blocks, 256, [&] {
    dispatch_expert_rows((const uint4*)x, (const int*)ids, (const float*)weights, (const uint4*)shared, (uint4*)all_x,
                         (int*)all_ids, (float*)all_weights, (uint4*)all_shared, *group, *sizes);
  });
}
EXPORT combine(const void* parts, const void* all_ids, void* out, const Group* group, const Sizes* sizes,
               int blocks) {
  return run_grid(blocks, 256, [&] {
    combine_expert_rows((const float4*)parts, (const int*)all_ids, (float4*)out, *group, *sizes);
  });
}
"""
BODIES = {
    "uint4 peek(": (
        "const volatile uint32_t* from = (const volatile uint32_t*)at;"
        "if (from[0] == kEmpty) sched_yield();"
        "return {from[0], from[1], from[2], from[3]};"
    ),
    "void put(": (
        "volatile uint32_t* to = (volatile uint32_t*)at; to[0] = v.x; to[1] = v.y; to[2] = v.z; to[3] = v.w;"
    ),
}
LIMIT_S = 60.0
ROW_VECTORS, SUM_VECTORS = MOST_BLOCKS * (3 + WIDTH // 8), MOST_BLOCKS * (1 + WIDTH // 4)


class Group(ctypes.Structure):
    """`Group` of the source."""

    _fields_ = (
        ("buffers", ctypes.c_void_p * 8),
        ("state", ctypes.c_void_p),
        ("is_aborted", ctypes.c_void_p),
        ("slot", ctypes.c_int64),
        ("rank", ctypes.c_int),
        ("size", ctypes.c_int),
    )


class Sizes(ctypes.Structure):
    """`Sizes` of the source."""

    _fields_ = tuple((name, ctypes.c_int) for name in ("tokens", "places", "first", "chosen", "experts", "row_vectors"))


@pytest.fixture(scope="module")
def build(emulation: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    def built(*, was: str = "", becomes: str = "") -> Path:
        folder = emulation.sources(tmp_path_factory)
        path = folder / "csrc" / "comm" / "peers.cuh"
        text = path.read_text("utf-8")
        for function, body in BODIES.items():
            text = emulation.with_body(text, function, body)
        path.write_text(text, "utf-8")
        source = folder / "csrc" / "comm" / "expert_rows.cu"
        text = source.read_text("utf-8")
        assert was in text
        source.write_text(text.replace(was, becomes, 1) if was else text, "utf-8")
        return emulation.build(folder, "expert_rows", SOURCE)

    return built


class Ranks:
    """So many ranks; each has its own copy of the library, whose threads and blocks are variables of it."""

    def __init__(self, library: Path, size: int) -> None:
        self.size, self._aborted = size, np.zeros(4, np.uint32)
        copies = [shutil.copy(library, library.with_name(f"{library.stem}_{size}_{rank}.so")) for rank in range(size)]
        self._libraries = [ctypes.CDLL(str(copy)) for copy in copies]
        self._memory: list[Any] = []
        self._groups = [self._connected(vectors) for vectors in (ROW_VECTORS, SUM_VECTORS)]

    def _connected(self, slot: int) -> list[Group]:
        buffers = [np.full(3 * self.size * slot * 4, 0x80000000, np.uint32) for _ in range(self.size)]
        states = [np.zeros(32, np.uint8) for _ in range(self.size)]
        self._memory += [*buffers, *states]
        groups = [Group(slot=slot, rank=rank, size=self.size) for rank in range(self.size)]
        for group, state in zip(groups, states, strict=True):
            group.state, group.is_aborted = state.ctypes.data, self._aborted.ctypes.data
            for rank, buffer in enumerate(buffers):
                group.buffers[rank] = buffer.ctypes.data
        return groups

    def run(self, kernel: str, arguments: Sequence[Sequence[Any]], *, places: int) -> None:
        """As `ExpertRows` does, on all ranks at once: as many places at a time as a buffer has."""
        for first in range(0, places, MOST_BLOCKS):
            blocks = min(MOST_BLOCKS, places - first)
            for *_, sizes in arguments:
                sizes.first = first
            self._run(kernel, arguments, blocks=blocks)

    def _run(self, kernel: str, arguments: Sequence[Sequence[Any]], *, blocks: int) -> None:
        groups, outcomes = self._groups[kernel == "combine"], [-1] * self.size

        def work(rank: int) -> None:
            *arrays, sizes = arguments[rank]
            pointers = [ctypes.c_void_p(each.ctypes.data) for each in arrays]
            call = getattr(self._libraries[rank], kernel)
            outcomes[rank] = call(*pointers, ctypes.byref(groups[rank]), ctypes.byref(sizes), blocks)

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.size)]
        ending = threading.Timer(LIMIT_S, lambda: self._aborted.fill(1))
        ending.start()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        ending.cancel()
        assert outcomes == [0] * self.size
        assert not self._aborted.any(), "ranks wait for what never comes"


class Step:
    """Rows of each rank, and what is right."""

    def __init__(self, rng: np.random.Generator, counts: Sequence[int], *, spread: int, places: int) -> None:
        size, self.places = len(counts), places
        self.x = [rng.integers(0, 1 << 16, (count, WIDTH)).astype(np.uint16) for count in counts]
        for each in self.x:
            each[:, ::5] = 0x8000  # -0, half of the bits that stand for nothing
            each[:, 1::5] = 0
        self.shared = [rng.integers(1, 1 << 15, (count, WIDTH)).astype(np.uint16) for count in counts]
        self.ids = [rng.integers(-1, spread, (count, CHOSEN)).astype(np.int32) for count in counts]
        self.weights = [rng.random((count, CHOSEN)).astype(np.float32) for count in counts]
        self.parts = [rng.normal(size=(size * places, WIDTH)).astype(np.float32) for _ in counts]
        for each in self.parts:
            each[:, ::7] = -0.0

    def chosen(self, owner: int, rank: int) -> np.ndarray:
        """Of a rank's rows, whether they chose an expert of another's; its own are its own all the same."""
        ids = self.ids[owner]
        return ((ids >= 0) & (ids // EXPERTS == rank)).any(axis=1) | (owner == rank)

    def sum_of(self, rank: int) -> np.ndarray:
        count = len(self.x[rank])
        total = np.zeros((count, WIDTH), np.float32)
        for sender, parts in enumerate(self.parts):
            part = parts[rank * self.places : rank * self.places + count]
            total += np.where(self.chosen(rank, sender)[:, None], part, np.float32(0))
        return total


def play(ranks: Ranks, step: Step) -> None:
    """One dispatch and one combine; parts of rows that do not come are NaN, which must not be added."""
    size, places = ranks.size, step.places

    def sizes(rank: int, row_vectors: int) -> Sizes:
        return Sizes(len(step.x[rank]), places, 0, CHOSEN, EXPERTS, row_vectors)

    found = [
        (
            np.full((size * places, WIDTH), 7, np.uint16),
            np.full((size * places, CHOSEN), 7, np.int32),
            np.full((size * places, CHOSEN), 7, np.float32),
            np.full((size * places, WIDTH), 7, np.uint16),
        )
        for _ in range(size)
    ]
    given = [(step.x[rank], step.ids[rank], step.weights[rank], step.shared[rank]) for rank in range(size)]
    arguments = [(*given[rank], *found[rank], sizes(rank, WIDTH // 8)) for rank in range(size)]
    ranks.run("dispatch", arguments, places=places)
    for rank, (x, ids, weights, shared) in enumerate(found):
        for owner in range(size):
            count, at = len(step.x[owner]), slice(owner * places, (owner + 1) * places)
            comes = step.chosen(owner, rank)
            expected = np.where(comes[:, None], step.x[owner], np.uint16(0))
            # The sign of a zero may be lost on the way.
            np.testing.assert_array_equal(without_signs(x[at][:count]), without_signs(expected))
            np.testing.assert_array_equal(x[at][count:], 0)
            np.testing.assert_array_equal(ids[at][:count], step.ids[owner])
            np.testing.assert_array_equal(ids[at][count:], -1)
            np.testing.assert_array_equal(weights[at][:count], step.weights[owner])
            np.testing.assert_array_equal(shared[at][:count], step.shared[owner] * (owner == rank))
            np.testing.assert_array_equal(shared[at][count:], 0)
            step.parts[rank][at][:count][~comes] = np.nan
            step.parts[rank][at][count:] = np.nan
    out = [np.full((len(step.x[rank]), WIDTH), 7, np.float32) for rank in range(size)]
    arguments = [(step.parts[rank], found[rank][1], out[rank], sizes(rank, WIDTH // 4)) for rank in range(size)]
    ranks.run("combine", arguments, places=places)
    for rank, total in enumerate(out):
        np.testing.assert_array_equal(total, step.sum_of(rank))


def without_signs(values: np.ndarray) -> np.ndarray:
    return np.where(values == 1 << 15, np.uint16(0), values)


def play_many(library: Path, size: int, *, turns: int = 9) -> None:
    """More turns than there are buffers, of changing sizes: also without rows of a rank, and few after many."""
    ranks, rng = Ranks(library, size), np.random.default_rng(size)
    for turn in range(turns):
        counts = rng.integers(0, MOST_PLACES + 1, size)
        counts[turn % size] = (MOST_PLACES, 1, 3)[turn % 3]
        if turn % 4 == 1:
            counts[(turn + 1) % size] = 0
        spread = size * EXPERTS if turn % 3 else EXPERTS
        play(ranks, Step(rng, counts.tolist(), spread=spread, places=int(counts.max())))


@pytest.mark.parametrize("size", [2, 3])
def test_chosen_rows_come_and_sums_go_back_over_many_turns(build: Callable[..., Path], size: int) -> None:
    play_many(build(), size)


MUTANTS = {
    "a rank's own part is left out": (
        "const float4 part = parts[own * vectors + v];",
        "const float4 part = {0, 0, 0, 0};",
    ),
    "the places of another rank": ("int64_t(peer) * sizes.places + row", "int64_t(group.rank) * sizes.places + row"),
    "ids of places without rows": ("unsigned(ids[row * chosen + at]) : ~0u", "unsigned(ids[row * chosen + at]) : 0u"),
    "buffers are not emptied": ("  empty_last_turn(group, turn);  //", "  //"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_found(build: Callable[..., Path], name: str) -> None:
    was, becomes = MUTANTS[name]
    with pytest.raises(AssertionError):
        play_many(build(was=was, becomes=becomes), 2)
