"""The CUDA operators of attention without a GPU: their sources, compiled for the host, and the code that launches them.

`cuda.hpp` and `fibers.hpp` stand for CUDA, three headers for those of ours that are inline assembly alone; functions
of other files that are, are given a body here. All else is what runs on a GPU, the Python that divides and launches it
as well: what is wrong with indices, masks, barriers or a structure of arguments is seen here. What is not: speed,
memory order, waits for copies that are missing.
"""

import ctypes
import importlib
import importlib.util
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from openinfer_kernels.cubins.sources import CSRC

HERE = Path(__file__).parent
HEADERS = {
    "ampere.cuh": "common/ampere.cuh",
    "hopper.cuh": "common/hopper.cuh",
    "attention_wgmma.cuh": "attention/attention_wgmma.cuh",
    "lora_mma.cuh": "lora/lora_mma.cuh",
}
BODIES = {
    ("attention/attention.cuh", "float exp2_fast("): "return emulated::exp2_flushed(x);",
    ("attention/attention.cuh", "void mma("): "emulated::mma(d, a0, a1, a2, a3, b0, b1);",
    ("attention/attention.cuh", "uint32_t packed("): (
        "return emulated::to_bfloat16(low) | emulated::to_bfloat16(high) << 16;"
    ),
    ("attention/attention.cuh", "int arrive("): "return atomicAdd(arrivals, 1);",
    ("attention/attention_variant.cuh", "float reciprocal_fast("): "return 1.0f / x;",
    ("attention/attention_kv_tile.cuh", "void load(uint32_t* to"): "memcpy(to, from, 16);",
    ("attention/attention_kv_tile.cuh", "uint32_t transposed("): "return emulated::transposed(matrix);",
    ("attention/attention_decode_hopper.cu", "void copy("): (
        "memcpy(target, from, bytes); hopper::complete(barrier, bytes);"
    ),
    ("attention_fp8/attention_prefill_staging.cuh", "void bulk_copy("): (
        "memcpy(target, from, bytes); hopper::complete(barrier, bytes);"
    ),
    ("attention_fp8/attention_kv_tile_fp8.cuh", "void mma_halves("): (
        "emulated::mma(d, a0, a1, a2, a3, b0, b1, emulated::half_float_of);"
    ),
    ("attention_fp8/attention_kv_tile_fp8.cuh", "uint32_t packed_halves("): (
        "return emulated::to_half(low) | emulated::to_half(high) << 16;"
    ),
    ("attention_fp8/attention_kv_tile_fp8.cuh", "float log2_fast("): "return log2f(x);",
}
"""Functions of inline assembly, and what they do."""
KERNELS = {
    "attention_prefill_hopper": ("64", "128", "256"),
    "attention_decode_variant": ("64_1", "128_1", "256_1"),
    "attention_decode_hopper_variant": ("64_1", "128_1", "256_1"),
    "attention_prefill_variant": ("32", "64", "128", "256"),
    "attention_prefill_hopper_variant": ("64", "128", "256"),
    "attention_decode_fp8": ("64_1", "64_2", "128_1", "128_2", "256_1"),
    "attention_decode_hopper_fp8": ("64_1", "64_2", "128_1", "128_2", "256_1"),
    "attention_prefill_fp8": ("32", "64", "128", "256"),
    "attention_prefill_hopper_fp8": ("64", "128", "256"),
    "fp8_contexts": ("fp8_contexts",),
}
STATIC = "#undef __shared__\n#define __shared__ static\n"
"""For kernels whose shared memory is of arrays with names."""
FLAGS = ("-O1", "-std=c++20", "-fno-strict-aliasing", "-shared", "-fPIC", "-fvisibility=hidden", "-w")
"""Kernels read registers as other types, which nvcc allows: without the third, g++ has left out such a read. Most of
these tests' time goes into compiling, a library for each planted mistake: -O2 takes twice as long as -O1 for that."""
OUTCOMES = ("done", "no such kernel", "arguments of another size", "threads wait for ever")


def emulated_sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with our sources in `csrc`, where some headers are replaced."""
    if shutil.which("g++") is None or platform.machine() != "x86_64":
        pytest.skip("kernels are emulated with g++ on x86-64")
    folder = tmp_path_factory.mktemp("emulated")
    shutil.copytree(CSRC, folder / "csrc")
    for name, place in HEADERS.items():
        shutil.copy(HERE / name, folder / "csrc" / place)
    for name in ("cuda_bf16.h", "cuda.h"):
        (folder / name).write_text('#include "cuda.hpp"\n', "utf-8")
    return folder


@pytest.fixture(scope="session")
def compile_emulated(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Takes a name and a source, which may include ours; gives its library."""
    return lambda name, source: build(emulated_sources(tmp_path_factory), name, source)


@pytest.fixture(scope="session")
def emulation() -> SimpleNamespace:
    """What tests need that replace other headers than those of attention."""
    return SimpleNamespace(here=HERE, sources=emulated_sources, build=build, with_body=with_body, tensor_map=TensorMap)


class Libraries(dict[str, Path]):
    """Stem -> the library of its kernels for this machine, made when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def __contains__(self, stem: object) -> bool:
        return stem in KERNELS

    def __missing__(self, stem: str) -> Path:
        self[stem] = compiled(self._folder, stem)
        return self[stem]


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Libraries:
    folder = emulated_sources(tmp_path_factory)
    for (name, function), body in BODIES.items():
        path = folder / "csrc" / name
        path.write_text(with_body(path.read_text("utf-8"), function, body), "utf-8")
    return Libraries(folder)


def with_body(text: str, function: str, body: str) -> str:
    """`text` with another body of the function whose declaration has `function`."""
    begin = text.index("{", text.index(")", text.index(function)))
    depth, end = 1, begin + 1
    while depth:
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        end += 1
    return f"{text[:begin]}{{ {body} }}{text[end:]}"


def compiled(folder: Path, stem: str) -> Path:
    given_map = "map" if stem in ("attention_prefill_hopper", "attention_prefill_hopper_variant") else "nullptr"
    calls = "".join(
        f'if (!strcmp(kind, "{kind}")) '
        f"return launch({named(stem, kind)}, {given_map}, arguments, bytes, blocks, threads);\n"
        for kind in KERNELS[stem]
    )
    (path,) = (folder / "csrc").rglob(f"{stem}.cu")
    source = f"""#include "fibers.hpp"
{STATIC if stem == "fp8_contexts" else ""}#include "{path.relative_to(folder / "csrc")}"
using namespace emulated;
extern "C" __attribute__((visibility("default"))) int run(const char* kind, const void* map, const void* arguments,
                                                          size_t bytes, int blocks, int threads) {{
{calls}return kNoSuchKernel; }}
"""
    return build(folder, stem, source)


def named(stem: str, kind: str) -> str:
    """A kernel's name in its source."""
    return stem if kind == stem else f"{stem}_{kind}"


def build(folder: Path, stem: str, source: str) -> Path:
    (folder / f"{stem}.cpp").write_text(source, "utf-8")
    target = folder / f"{stem}.so"
    includes = [f"-I{path}" for path in (folder, HERE, folder / "csrc")]
    command = ["g++", *FLAGS, *includes, str(folder / f"{stem}.cpp"), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:4000]
    return target


class Kernel:
    """A kernel of one of the libraries, called as `openinfer_kernels.cuda.common.launch.Kernel` is."""

    def __init__(self, path: Path, kind: str) -> None:
        self._run, self._kind = ctypes.CDLL(str(path)).run, kind.encode()

    def __call__(self, grid: Any, block: Any, arguments: list[Any], *, overlap: bool) -> None:
        *maps, last = arguments
        given_map = ctypes.byref(maps[0]) if maps else None
        sizes = ctypes.c_size_t(ctypes.sizeof(last)), grid[0], block[0]
        outcome = self._run(self._kind, given_map, ctypes.byref(last), *sizes)
        assert outcome == 0, OUTCOMES[outcome]


class Device:
    """As much of a device as attention asks for."""

    def __init__(self, libraries: Libraries, *, hopper: bool, num_multiprocessors: int) -> None:
        self._libraries, self._hopper, self.num_multiprocessors = libraries, hopper, num_multiprocessors

    def has(self, stem: str) -> bool:
        return self._hopper

    def kernel(self, stem: str, name: str, *, shared_bytes: int = 0) -> Kernel | None:
        """None for a kernel that is not emulated."""
        assert shared_bytes <= 227 * 1024
        return Kernel(self._libraries[stem], name.removeprefix(f"{stem}_")) if stem in self._libraries else None


class TensorMap(ctypes.Structure):
    _fields_ = (("words", ctypes.c_uint64 * 16),)


class TensorMaps:
    """`CUtensorMap` of `cuda.hpp`: address, columns, rows."""

    def of(self, shard: Any) -> TensorMap:
        return TensorMap((shard.address, *shard.sizes))


def empty(shape: Any, dtype: Any) -> np.ndarray:
    """NaN, at an address that is a multiple of 64."""
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.full(count + 64, 0xFF, np.uint8)
    begin = -memory.ctypes.data % 64
    return memory[begin : begin + count].view(dtype).reshape(shape)


@pytest.fixture(scope="module")
def paged(libraries: Libraries) -> Iterator[ModuleType]:
    """`openinfer_kernels.cuda.attention.paged` over arrays of NumPy."""
    if importlib.util.find_spec("cupy") is not None:
        pytest.skip("CuPy is installed: kernels run on its GPU")
    cupy = SimpleNamespace(ndarray=np.ndarray, empty=empty, zeros=np.zeros)
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cupy", cupy)
        patch.setitem(sys.modules, "cuda.bindings.driver", MagicMock())
        arrays = importlib.import_module("openinfer_kernels.cuda.common.arrays")
        maps = importlib.import_module("openinfer_kernels.cuda.common.tensor_maps")
        patch.setattr(arrays, "address", lambda array: array.ctypes.data)
        patch.setattr(maps, "TensorMaps", TensorMaps)
        yield importlib.import_module("openinfer_kernels.cuda.attention.paged")
    for name in set(sys.modules) - before:
        if name.startswith("openinfer_kernels.cuda"):
            del sys.modules[name]


@pytest.fixture(scope="module")
def make_attention(paged: ModuleType, libraries: Libraries) -> Callable[..., Any]:
    """The operator on an emulated GPU: `Attention`, or `OneKernelAttention` where it is to be batch-invariant."""

    def make(*, hopper: bool, multiprocessors: int = 3, batch_invariant: bool = False) -> Any:
        device = Device(libraries, hopper=hopper, num_multiprocessors=multiprocessors)
        return (paged.OneKernelAttention if batch_invariant else paged.Attention)(device)

    return make


@pytest.fixture(scope="session")
def on_device() -> Callable[[np.ndarray], np.ndarray]:
    """Copies to BF16 at an address that kernels take."""
    ml_dtypes = pytest.importorskip("ml_dtypes")

    def copied(array: np.ndarray) -> np.ndarray:
        there = empty(array.shape, ml_dtypes.bfloat16)
        there[...] = array
        return there

    return copied
