"""Attention over latents as the CUDA kernels compute it in the absorbed form, emulated, against the CPU's operator.

The copies are those of GPUs before Hopper, as Hopper's are inline assembly; what is divided, masked and added is the
same.
"""

import ctypes
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import ml_dtypes
import numpy as np
import pytest

from openinfer_kernels import AttentionBatch, PagedCache
from openinfer_kernels.cpu import CpuOps
from openinfer_kernels.weights.bfloat16 import rounded

STEMS = {
    "latent_queries": ("latent_queries",),
    "latent_attention": tuple(f"latent_attention_{kind}" for kind in ("4", "4_from")),
    "latent_merge": ("latent_merge",),
    "latent_values": ("latent_values_16", "latent_values_32"),
}
BODIES = {
    "float exp2_fast(": "return emulated::exp2_flushed(x);",
    "void mma(": "emulated::mma(d, a0, a1, a2, a3, b0, b1);",
    "uint32_t packed(": "return emulated::to_bfloat16(low) | emulated::to_bfloat16(high) << 16;",
}
"""Functions of `attention/attention.cuh` that are inline assembly."""
ENTRY, LATENT, BLOCK_TOKENS = 576, 512, 16
ROWS = [(1, 1), (40, 9), (37, 1), (150, 3), (200, 1)]
"""Tokens of each row's context, and of its query."""


def source(stem: str) -> str:
    """A function that runs one of the kernels of a source on a grid."""
    static = "#undef __shared__\n#define __shared__ static\n" if stem in ("latent_queries", "latent_merge") else ""
    kind = "latent::Arguments" if stem == "latent_attention" else "Arguments"
    calls = "".join(f'if (!strcmp(name, "{name}")) kernel = [=] {{ {name}(*given); }};\n' for name in STEMS[stem])
    return f"""#include "fibers.hpp"
{static}#include "mla/{stem}.cu"
using namespace emulated;
extern "C" __attribute__((visibility("default"))) int run(const char* name, const {kind}* given, size_t bytes, int x,
                                                          int y, int z, int threads) {{
  if (bytes != sizeof(*given)) return 2;
  kernel = nullptr;
{calls}  if (!kernel) return 1;
  gridDim = {{x, y, z}}, blockDim = {{threads, 1, 1}};
  for (int i = 0; i < x * y * z; i++) {{
    blockIdx = {{i % x, i / x % y, i / (x * y)}};
    if (!run_block(threads)) return 3;
  }}
  return 0;
}}
"""


class Kernel:
    """As `openinfer_kernels.cuda.common.launch.Kernel` is called."""

    def __init__(self, path: Path, name: str) -> None:
        self._run, self._name = ctypes.CDLL(str(path)).run, name.encode()

    def __call__(self, grid: Any, block: Any, arguments: list[Any], *, overlap: bool) -> None:
        (given,) = arguments
        size = ctypes.c_size_t(ctypes.sizeof(given))
        outcome = self._run(self._name, ctypes.byref(given), size, *grid, block[0])
        assert outcome == 0, ("no such kernel", "arguments of another size", "threads wait for ever")[outcome - 1]


def empty(shape: Any, dtype: Any) -> np.ndarray:
    """NaN, at an address that is a multiple of 64."""
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.full(count + 64, 0xFF, np.uint8)
    begin = -memory.ctypes.data % 64
    return memory[begin : begin + count].view(dtype).reshape(shape)


@pytest.fixture(scope="module")
def make_attention(
    emulation: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Any]]:
    """The operator on a device of so many multiprocessors, from sources whose text may be changed."""
    originals: dict[tuple[str, str], Path] = {}

    def library(stem: str, old: str, new: str) -> Path:
        if (stem, old) not in originals:
            folder = emulation.sources(tmp_path_factory)
            header = folder / "csrc/attention/attention.cuh"
            text = header.read_text("utf-8")
            for function, body in BODIES.items():
                text = emulation.with_body(text, function, body)
            header.write_text(text, "utf-8")
            path = folder / "csrc/mla/latent_attention.cu"
            assert old in path.read_text("utf-8")
            path.write_text(path.read_text("utf-8").replace(old, new), "utf-8")
            originals[stem, old] = emulation.build(folder, stem, source(stem))
        return originals[stem, old]

    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cupy", SimpleNamespace(ndarray=np.ndarray, empty=empty))
        patch.setitem(sys.modules, "cuda.bindings.driver", MagicMock())
        patch.setitem(sys.modules, "openinfer_kernels.cuda.gemm.linear", MagicMock())  # of the expanded form alone
        arrays = importlib.import_module("openinfer_kernels.cuda.common.arrays")
        patch.setattr(arrays, "address", lambda array: array.ctypes.data)
        module = importlib.import_module("openinfer_kernels.cuda.mla.latent_attention")

        def make(multiprocessors: int, old: str = "", new: str = "") -> Any:
            def kernel(stem: str, name: str, *, shared_bytes: int = 0) -> Kernel:
                return Kernel(library(stem, old, new) if stem == "latent_attention" else library(stem, "", ""), name)

            device = SimpleNamespace(
                has=lambda stem: False,
                kernel=kernel,
                num_multiprocessors=multiprocessors,
                max_shared_bytes=227 * 1024,
            )
            return module.LatentAttention(device, None).latent_attention

        yield make
    for name in set(sys.modules) - before:
        if name.startswith("openinfer_kernels.cuda"):
            del sys.modules[name]


class Case:
    """Random rows, with anything in the cache where no token lies or none is seen."""

    def __init__(self, num_heads: int, first_key: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        counts = np.array([query for _, query in ROWS])
        ends = np.array([context for context, _ in ROWS], np.int32)
        columns = -(-int(ends.max()) // BLOCK_TOKENS)
        tables = rng.permutation(len(ROWS) * columns).reshape(len(ROWS), columns).astype(np.int32)
        data = np.full((len(ROWS) * columns, 2, 1, 1, BLOCK_TOKENS, ENTRY), np.nan, np.float32)
        for table, end in zip(tables, ends.tolist(), strict=True):
            blocks, offsets = np.divmod(np.arange(min(first_key, end), end), BLOCK_TOKENS)
            data[table[blocks], 1, 0, 0, offsets] = rng.normal(size=(len(blocks), ENTRY))
        positions = np.concatenate([np.arange(end - count, end) for end, count in zip(ends, counts, strict=True)])
        self.sees = positions >= first_key
        self.first_key = first_key
        self.data = rounded(data)
        self.q = rounded(rng.normal(size=(len(positions), num_heads, 192)).astype(np.float32))
        self.weight = rounded(rng.normal(size=(num_heads * 256, LATENT)).astype(np.float32) / LATENT**0.5)
        self.batch = AttentionBatch(
            positions=positions.astype(np.int32),
            query_starts=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
            context_lens=ends,
            block_tables=(tables,),
            cache_slots=(np.zeros(len(positions), np.int64),),
            max_query_tokens=int(counts.max()),
            max_context_tokens=int(ends.max()),
            block_tokens=BLOCK_TOKENS,
        )

    def run(self, operator: Any, *, dtype: Any = np.float32) -> np.ndarray:
        def copied(array: np.ndarray) -> np.ndarray:
            there = empty(array.shape, dtype)
            there[...] = array
            return there

        found = operator(
            copied(self.q),
            PagedCache(data=copied(self.data), layer=1),
            kv_b_proj=copied(self.weight),
            batch=self.batch,
            scale=192**-0.5,
            first_key=self.first_key,
        )
        return np.asarray(found, np.float32)

    def is_right(self, operator: Any) -> bool:
        found, expected = self.run(operator, dtype=ml_dtypes.bfloat16), self.run(CpuOps.latent_attention)
        error = np.linalg.norm(found[self.sees] - expected[self.sees]) / np.linalg.norm(expected[self.sees])
        return bool(error < 1e-2)


@pytest.mark.parametrize("first_key", [0, 1, 33, 100])
@pytest.mark.parametrize("multiprocessors", [7, 40])
def test_rows_of_any_length_are_right_from_any_first_key(
    make_attention: Callable[..., Any], first_key: int, multiprocessors: int
) -> None:
    for num_heads in (3, 20):
        assert Case(num_heads, first_key, seed=num_heads).is_right(make_attention(multiprocessors))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("key >= a.first_key", "key > a.first_key"),
        ("key >= a.first_key", "true"),
        ("clear_vectors(entries, 0, unseen, lane);", ""),
        ("from + unseen * kEntry, vectors - unseen", "from, vectors"),
        ("here.seen) <= a.first_key", "here.seen) <= a.first_key + kHeads"),
    ],
)
def test_a_kernel_that_is_wrong_before_the_first_key_is_noticed(
    make_attention: Callable[..., Any], old: str, new: str
) -> None:
    assert not all(Case(3, first_key, seed=3).is_right(make_attention(7, old, new)) for first_key in (1, 3, 33))


def test_a_negative_first_key_is_refused(make_attention: Callable[..., Any]) -> None:
    from openinfer_kernels import ArrayMismatchError

    case = Case(3, 0, seed=3)
    case.first_key = -1
    with pytest.raises(ArrayMismatchError, match="first_key -1: at least 0"):
        case.run(make_attention(1), dtype=ml_dtypes.bfloat16)
