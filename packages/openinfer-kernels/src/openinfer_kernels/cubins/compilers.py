"""The two compilers of CUDA sources: nvcc of a CUDA toolkit, and NVRTC, a library that comes with the CUDA extras.

NVRTC needs neither a toolkit nor a host compiler, but it has no headers of the host: the two that our sources name are
handed to it here.
"""

import importlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Protocol

from openinfer_kernels.cubins.sources import FLAGS, Source
from openinfer_kernels.errors import CUDA_IS_BROUGHT_BY, KernelBuildError

_LONGEST_MESSAGE = 4000
_INTEGERS = """#pragma once
typedef signed char int8_t; typedef unsigned char uint8_t; typedef short int16_t; typedef unsigned short uint16_t;
typedef int int32_t; typedef unsigned int uint32_t; typedef long long int64_t; typedef unsigned long long uint64_t;
typedef unsigned long uintptr_t; typedef long intptr_t;
"""
_TENSOR_MAP = """#pragma once
struct CUtensorMap { alignas(64) unsigned long long opaque[16]; };
"""
_HOST_HEADERS = {"cstdint": _INTEGERS, "cuda.h": _TENSOR_MAP}
"""What our sources may include besides CUDA's device headers; the driver's `cuda.h` declares host functions."""


class Compiler(Protocol):
    """Makes cubins."""

    @property
    def name(self) -> str:
        """For messages."""
        ...

    def compile(self, source: Source, architecture: str) -> bytes:
        """The cubin of one source; may be called from several threads.

        Raises:
            KernelBuildError: the compiler's message.
        """
        ...


class Nvcc:
    """The compiler of a CUDA toolkit; it needs a C++ compiler next to it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def name(self) -> str:
        return "nvcc"

    @classmethod
    def find(cls) -> "Nvcc | None":
        """The one of the path, of `CUDA_HOME` or of `/usr/local/cuda`; None where it or a C++ compiler is missing."""
        homes = [home for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if home]
        on_path = shutil.which("nvcc")
        candidates = [*([Path(on_path)] if on_path else []), *(Path(home, "bin", "nvcc") for home in homes)]
        found = next((path for path in candidates if path.is_file()), None)
        return None if found is None or shutil.which("g++") is None else cls(found)

    def compile(self, source: Source, architecture: str) -> bytes:
        """The long form of the architecture: nvcc's short one adds a pass that rejects Hopper's `a`."""
        virtual = architecture.replace("sm_", "compute_")
        with tempfile.TemporaryDirectory(prefix="openinfer-nvcc-") as scratch:
            target = Path(scratch, "cubin")
            command = [str(self._path), "-cubin", "-O3", f"-gencode=arch={virtual},code={architecture}", *FLAGS]
            command += ["-I", str(source.root), "-o", str(target), str(source.path)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - a fixed program
            if done.returncode:
                raise _refused(self.name, source, architecture, done.stderr)
            return target.read_bytes()


class Nvrtc:
    """The compiler that is a library: `nvidia-cuda-nvrtc`, called through `cuda-bindings`."""

    def __init__(self) -> None:
        self._nvrtc: Any = importlib.import_module("cuda.bindings.nvrtc")
        include: str | None = importlib.import_module("cuda.pathfinder").find_nvidia_header_directory("cudart")
        if include is None:
            raise KernelBuildError(
                "NVRTC finds no CUDA headers (cuda_bf16.h); install nvidia-cuda-runtime, or set CUDA_HOME to a toolkit"
            )
        self._include = include

    @property
    def name(self) -> str:
        return "NVRTC"

    @classmethod
    def find(cls) -> "Nvrtc | None":
        """None where `cuda-bindings` is not installed."""
        installed = importlib.util.find_spec("cuda") and importlib.util.find_spec("cuda.bindings")
        return cls() if installed else None

    def compile(self, source: Source, architecture: str) -> bytes:
        given = _HOST_HEADERS | {name: path.read_text("utf-8") for name, path in source.headers().items()}
        names, texts = [name.encode() for name in given], [text.encode() for text in given.values()]
        program = self._call(
            "nvrtcCreateProgram", source.path.read_bytes(), source.path.name.encode(), len(names), texts, names
        )
        options = [f"--gpu-architecture={architecture}", f"--include-path={self._include}", *FLAGS]
        try:
            (result,) = self._nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
            if result != self._nvrtc.nvrtcResult.NVRTC_SUCCESS:
                log = self._read("ProgramLog", program).decode(errors="replace")
                raise _refused(self.name, source, architecture, log)
            return self._read("CUBIN", program)
        finally:
            self._call("nvrtcDestroyProgram", program)

    def _read(self, what: str, program: Any) -> bytes:
        content = bytes(self._call(f"nvrtcGet{what}Size", program))
        self._call(f"nvrtcGet{what}", program, content)
        return content

    def _call(self, name: str, *arguments: Any) -> Any:
        result, *values = getattr(self._nvrtc, name)(*arguments)
        if result != self._nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise KernelBuildError(f"{name} failed: {result.name}")
        return values[0] if values else None


def find_compiler() -> Compiler:
    """nvcc, else NVRTC; raises `KernelBuildError` where neither is there."""
    compiler = Nvcc.find() or Nvrtc.find()
    if compiler is None:
        raise KernelBuildError(
            "found no compiler for the CUDA kernels: no nvcc with g++ (PATH, CUDA_HOME, /usr/local/cuda), no NVRTC; "
            f"install a CUDA toolkit, or: {CUDA_IS_BROUGHT_BY}"
        )
    return compiler


def _refused(compiler: str, source: Source, architecture: str, message: str) -> KernelBuildError:
    shortened = message if len(message) <= _LONGEST_MESSAGE else message[:_LONGEST_MESSAGE] + "\n[...]"
    return KernelBuildError(f"{compiler} failed on {source.path.name} for {architecture}:\n{shortened}")
