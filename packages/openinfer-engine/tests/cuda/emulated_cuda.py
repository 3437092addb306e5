"""A GPU's worker without a GPU: NumPy in the place of CuPy, and kernels compiled for the host.

`install` puts stand-ins in the place of `cupy` and `cuda.bindings.driver`, so it belongs to a process of its own. What
the model computes is left to `CpuOps`; the kernels of `csrc/sampling/steps.cu`, `drafts.cu` and `drafters.cu` run as
they are, thread by thread, so that a test of `CudaWorker` here tests their arithmetic of indices too.
"""

import ctypes
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np

import openinfer_kernels

CSRC = Path(openinfer_kernels.__file__).parent / "csrc"
_SOURCES = "sampling/steps.cu", "sampling/drafts.cu", "sampling/drafters.cu"
_KERNEL = re.compile(r'extern "C" __global__ void (?:__launch_bounds__\(\d+\) )?(\w+)\(')
_HOST_CUDA = """
#include <algorithm>
#include <cstdint>
#include <cstring>
#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(threads)
using std::max;
using std::min;
struct Place { int x, y, z; };
static Place threadIdx{}, blockIdx{}, blockDim{}, gridDim{};
struct uint4 { uint32_t x, y, z, w; };
static void __syncthreads() {}
static int atomicAdd(int* target, int value) { const int old = *target; *target += value; return old; }
"""
_LAUNCHES = """
template <auto kernel> struct Launch;
template <typename... Given, void (*kernel)(Given...)>
struct Launch<kernel> {  // all threads in one call: one for each took a quarter of these tests
  static void run(int blocks, int lines, int threads, Given... given) {
    blockDim.x = threads, gridDim.x = blocks, gridDim.y = lines;
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++)
      for (blockIdx.y = 0; blockIdx.y < lines; blockIdx.y++)
        for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x++) kernel(given...);
  }
};
"""
_PER_ITEM = 128
"""Threads of a block of kernels that have a thread for each item; the others loop, and run as one thread here."""
_one_kernel = threading.Lock()  # where a thread stands is a global of the library
_LOOPING = (
    "steps_prepare_decode",
    "steps_prepare_chunks",
    *(
        f"drafters_{name}"
        for name in ("restore", "before", "keep", "settle", "clear", "spans", "place", "put_late", "take_late", "rows")
    ),
)


class Array(np.ndarray):
    """A NumPy array with the address that CuPy's have.

    What CuPy compiles kernels for when it is asked first, which takes up to half a second each, the engine's own
    modules may not ask for: indices that are arrays, and arithmetic.
    """

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data)

    def __getitem__(self, key: Any) -> Any:
        _refuse_compiling(_has_arrays(key))
        return super().__getitem__(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        _refuse_compiling(_has_arrays(key))
        super().__setitem__(key, value)

    def __add__(self, other: Any) -> Any:
        _refuse_compiling(True)
        return super().__add__(other)

    def __sub__(self, other: Any) -> Any:
        _refuse_compiling(True)
        return super().__sub__(other)


def _has_arrays(key: Any) -> bool:
    return any(isinstance(each, np.ndarray) for each in (key if isinstance(key, tuple) else (key,)))


def _refuse_compiling(compiles: bool) -> None:
    caller = sys._getframe(2).f_globals.get("__name__", "")  # noqa: SLF001 - who asks
    assert not (compiles and caller.startswith("openinfer_engine.cuda.")), f"{caller}: CuPy compiles a kernel for this"


def array(values: Any) -> Any:
    return np.asarray(values).view(Array)


def install() -> None:
    """Puts the stand-ins where `openinfer_kernels.cuda` imports CuPy and the driver from."""
    cupy: Any = ModuleType("cupy")
    cupy.ndarray = Array
    cupy.asnumpy = np.asarray
    # What is not written yet may be anything on a GPU.
    cupy.empty = lambda shape, dtype: array(np.full(shape, 113, dtype))
    cupy.zeros = lambda shape, dtype: array(np.zeros(shape, dtype))
    cupy.asarray = _from_host
    stream = SimpleNamespace(ptr=0, synchronize=lambda: None)
    cupy.cuda = SimpleNamespace(
        Event=_Event,
        Stream=_Stream,
        MemoryPool=lambda: SimpleNamespace(malloc=None),
        using_allocator=lambda _: nullcontext(),
        alloc_pinned_memory=bytearray,
        get_current_stream=lambda: stream,
        get_elapsed_time=lambda *_: 1.0,
        runtime=SimpleNamespace(
            memcpyAsync=lambda target, source, nbytes, *_: ctypes.memmove(target, source, nbytes),
            memsetAsync=lambda target, value, nbytes, *_: ctypes.memset(target, value, nbytes),
        ),
    )
    sys.modules["cupy"] = cupy
    driver: Any = ModuleType("cuda.bindings.driver")
    for name in ("cuda", "cuda.bindings"):
        sys.modules[name] = ModuleType(name)
    sys.modules["cuda.bindings.driver"] = driver
    # The operators are others here, so that the libraries behind them need not be there.
    operators: Any = ModuleType("openinfer_kernels.cuda.ops")
    operators.CudaOps = object
    sys.modules["openinfer_kernels.cuda.ops"] = operators


_capturing: list[Any] = []


def _from_host(values: Any) -> Any:
    assert not _capturing, "a copy from the host is not captured"
    return array(np.array(values))


class _Event:
    def __init__(self, **_: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


class _Stream(AbstractContextManager[None]):
    ptr = 0

    def __init__(self, **_: Any) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def synchronize(self) -> None:
        pass


class Replay:
    """A graph: the work again, its results where they were the first time."""

    launched: ClassVar[Counter[str]] = Counter()
    """Of all graphs, by what they captured."""

    def __init__(self, work: Callable[[], Any], results: Any) -> None:
        self._work, self._results = work, results

    def launch(self) -> None:
        self.launched[getattr(self._work, "func", self._work).__qualname__] += 1
        _overwrite(self._results, self._work())


def capture(_: Any, work: Callable[[], Any]) -> tuple[Replay, Any]:
    """In the place of `Stream.capture`; nothing comes from the host in one, as on a GPU."""
    _capturing.append(work)
    try:
        results = work()
    finally:
        _capturing.pop()
    return Replay(work, results), results


def _overwrite(targets: Any, sources: Any) -> None:
    if targets is None:
        return
    if isinstance(targets, np.ndarray):
        targets[...] = sources
    elif isinstance(targets, tuple):
        for target, source in zip(targets, sources, strict=True):
            _overwrite(target, source)
    else:
        for name in targets.__slots__:
            _overwrite(getattr(targets, name), getattr(sources, name))


def _host_source() -> str:
    names = [name for source in _SOURCES for name in _KERNEL.findall((CSRC / source).read_text("utf-8"))]
    includes = "".join(f'#include "{source}"\n' for source in _SOURCES)
    launches = "".join(f'extern "C" auto* const launch_{name} = &Launch<{name}>::run;\n' for name in names)
    return _HOST_CUDA + includes + _LAUNCHES + launches


class Kernels:
    """A `Device` that has the kernels of steps."""

    index = 0

    def __init__(self, folder: Path) -> None:
        source, library = folder / "steps.cpp", folder / "steps.so"
        source.write_text(_host_source())
        options = ["-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-I", str(CSRC)]
        subprocess.run(["g++", *options, str(source), "-o", str(library)], check=True)
        self._library = ctypes.CDLL(str(library))

    def kernel(self, stem: str, name: str, *, shared_bytes: int = 0) -> "_Kernel":
        del stem, shared_bytes
        return _Kernel(name, ctypes.c_void_p.in_dll(self._library, f"launch_{name}"))

    def use(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


class _Kernel:
    def __init__(self, name: str, launch: ctypes.c_void_p) -> None:
        self._launch = ctypes.CFUNCTYPE(None)(launch.value)
        self._is_looping = name in _LOOPING

    def __call__(
        self, grid: tuple[int, int, int], block: tuple[int, int, int], arguments: Sequence[Any], **_: Any
    ) -> None:
        given = [ctypes.c_void_p(each.data.ptr) if isinstance(each, Array) else each for each in arguments]
        threads = block[0] if block[0] == _PER_ITEM and not self._is_looping else 1
        with _one_kernel:
            self._launch(grid[0], grid[1], threads, *given)


def emulated_ops(ops: Any, kernels: Kernels) -> Any:
    """`CudaOps` of `kernels`, whose operators are those of `ops`, in host memory, but for hidden states of drafters."""
    from openinfer_kernels.cuda.sampling.drafting import Drafting  # needs what `install` puts there

    drafting = Drafting(kernels, None, None)

    class Ops(type(ops)):
        device = kernels
        hidden_before = staticmethod(drafting.hidden_before)
        keep_hidden = staticmethod(drafting.keep_hidden)
        settle_hidden = staticmethod(drafting.settle_hidden)

        def __getattribute__(self, name: str) -> Any:
            found = super().__getattribute__(name)
            return _with_addresses(found) if callable(found) and not name.startswith("_") else found

        def tuning(self) -> AbstractContextManager[None]:
            return nullcontext()

    return Ops()


def _with_addresses(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return _addressed(function(*args, **kwargs))

    return call


def _addressed(result: Any) -> Any:
    if isinstance(result, np.ndarray):
        return array(result)
    if hasattr(result, "top_ids"):
        return type(result)(**{name: array(getattr(result, name)) for name in result.__slots__})
    return result
