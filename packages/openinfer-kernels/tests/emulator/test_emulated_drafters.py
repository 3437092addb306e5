"""Hidden states of drafters as the CUDA kernels keep them, emulated, against the CPU's operators."""

import ctypes
import importlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import ml_dtypes
import numpy as np
import pytest

from openinfer_kernels.cpu import CpuOps
from openinfer_kernels.testing.drafting import check_drafting

KERNELS = {
    "restore": "const Hidden*, const Step*",
    "before": "const char*, const Hidden*, const Step*, char*",
    "keep": "const char*, const Hidden*, const Step*",
    "settle": "const Hidden*, const int*, const int*, const char*, char*",
    "join": "const char*, char*, int64_t, int",
    "clear": "char*, const int*, int, int",
    "add": "float*, const float*, int64_t, int, int",
    "ids": "int*, const int*, int*, int, int",
}


def source() -> str:
    """A function for each kernel that takes structures by their addresses, and runs it on a grid."""
    text = '#include "fibers.hpp"\n#include "sampling/drafters.cu"\nusing namespace emulated;\n'
    for name, types in KERNELS.items():
        kinds = types.split(", ")
        declared = ", ".join(f"{kind} a{i}" for i, kind in enumerate(kinds))
        given = ", ".join(f"*a{i}" if kind[6:] in ("Hidden*", "Step*") else f"a{i}" for i, kind in enumerate(kinds))
        text += (
            f'extern "C" __attribute__((visibility("default"))) int run_{name}({declared}, int blocks, int threads)\n{{'
            f"  return run_grid(blocks, threads, [&] {{ drafters_{name}({given}); }});\n}}\n"
        )
    return text


class Kernel:
    """As `openinfer_kernels.cuda.common.launch.Kernel` is called."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def __call__(self, grid: Any, block: Any, arguments: list[Any]) -> None:
        given: list[Any] = []
        for each in arguments:
            if isinstance(each, np.ndarray):
                given.append(ctypes.c_void_p(each.ctypes.data))
            else:
                given.append(ctypes.byref(each) if isinstance(each, ctypes.Structure) else each)
        assert self._run(*given, grid[0], block[0]) == 0


class Float32Memory:
    """Of the compute dtype of the CPU."""

    upload = staticmethod(CpuOps().upload)


@pytest.fixture(scope="module")
def drafting(compile_emulated: Any) -> Iterator[Any]:
    """`Drafting` over arrays of NumPy."""
    library = ctypes.CDLL(str(compile_emulated("drafters", source())))
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        stand_in = SimpleNamespace(ndarray=np.ndarray, empty=lambda shape, dtype: np.full(shape, 77, dtype))
        patch.setitem(sys.modules, "cupy", stand_in)
        patch.setitem(sys.modules, "cuda.bindings.driver", MagicMock())
        arrays = importlib.import_module("openinfer_kernels.cuda.common.arrays")
        patch.setattr(arrays, "address", lambda array: array.ctypes.data)
        module = importlib.import_module("openinfer_kernels.cuda.sampling.drafting")
        device = SimpleNamespace(
            kernel=lambda stem, name: Kernel(getattr(library, f"run_{name.removeprefix('drafters_')}"))
        )
        yield module.Drafting(device, Float32Memory(), CpuOps())
    for name in set(sys.modules) - before:
        if name.startswith("openinfer_kernels.cuda"):
            del sys.modules[name]


@pytest.mark.parametrize("seed", range(3))
def test_steps_of_random_rows_are_kept_as_on_the_cpu(drafting: Any, seed: int) -> None:
    names = ("hidden_before", "keep_hidden", "settle_hidden", "draft_ids", "put_ids", "add_logits")
    ops: Any = type("Ops", (CpuOps,), {name: staticmethod(getattr(drafting, name)) for name in names})()

    assert check_drafting(ops, seed=seed) > 300


def test_columns_are_joined(drafting: Any) -> None:
    rng = np.random.default_rng(0)
    parts = [rng.normal(size=(5, width)).astype(ml_dtypes.bfloat16) for width in (8, 24, 16)]

    np.testing.assert_array_equal(drafting.join_columns(*parts), np.concatenate(parts, axis=1))


def test_what_the_kernels_cannot_read_is_refused(drafting: Any) -> None:
    from openinfer_kernels import ArrayMismatchError, HiddenMemory

    def memory(width: int, slots: int = 4) -> HiddenMemory:
        return HiddenMemory(
            last=np.zeros((slots, width), np.float32),
            tail=np.zeros((4, 3, width), np.float32),
            ends=np.zeros(4, np.int32),
            begun=np.zeros(4, np.int32),
        )

    column = np.zeros(2, np.int32)
    with pytest.raises(ArrayMismatchError, match="16 bytes are copied at once"):
        drafting.settle_hidden(memory(6), column, column)
    with pytest.raises(ArrayMismatchError, match="kept as"):
        drafting.settle_hidden(memory(8, slots=3), column, column)
    with pytest.raises(ArrayMismatchError, match="the lengths"):
        drafting.settle_hidden(memory(8), column, column.astype(np.int64))
    with pytest.raises(ArrayMismatchError, match="2 ids for column 3"):
        drafting.put_ids(column, np.zeros((2, 3), np.int32), 3)
    sums = np.zeros((2, 8), np.float32)
    with pytest.raises(ArrayMismatchError, match="the logits must be a matrix of float32"):
        drafting.add_logits(sums, np.zeros((4, 8)), first=0, step=2)
    with pytest.raises(ArrayMismatchError, match="row 2 of every 2"):
        drafting.add_logits(sums, np.zeros((4, 8), np.float32), first=2, step=2)
    with pytest.raises(ArrayMismatchError, match=r"row 0 of every 2 of logits \(3, 8\)"):
        drafting.add_logits(sums, np.zeros((3, 8), np.float32), first=0, step=2)
    with pytest.raises(ArrayMismatchError, match="rows alike"):
        drafting.join_columns(np.zeros((2, 8), ml_dtypes.bfloat16), np.zeros((3, 8), ml_dtypes.bfloat16))
