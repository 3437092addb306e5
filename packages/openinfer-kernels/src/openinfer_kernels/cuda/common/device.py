"""The GPU that operators run on: whether there is one, what it can do, and our kernels loaded on it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from openinfer_kernels.cubins import architecture_of, require_cubins, sources
from openinfer_kernels.cuda.common.launch import Kernel, Module, check
from openinfer_kernels.cuda.common.libraries import cupy, driver
from openinfer_kernels.errors import DeviceUnavailableError
from openinfer_kernels.gpu_requirements import (
    NO_DRIVER,
    NO_GPU,
    require_capability,
    require_driver,
    require_index,
)

_OVERLAP_CAPABILITY = (9, 0)
"""Hopper, the first with programmatic dependent launch."""


class Device:
    """One GPU with our kernels. Its operators are called by one thread at a time, which has called `use`."""

    def __init__(self, index: int, properties: dict[str, Any], cubins: dict[str, Path]) -> None:
        """`open` is what finds the cubins; each is loaded with the first of its kernels."""
        self.index = index
        self.name: str = properties["name"].decode()
        self.capability: tuple[int, int] = (properties["major"], properties["minor"])
        self.num_multiprocessors: int = properties["multiProcessorCount"]
        self.l2_bytes: int = properties["l2CacheSize"]
        self.max_shared_bytes: int = properties["sharedMemPerBlockOptin"]
        self.memory_bytes: int = properties["totalGlobalMem"]
        self._cubins = cubins
        self._modules: dict[str, Module] = {}

    @classmethod
    def open(
        cls,
        index: int = 0,
        *,
        as_capability: tuple[int, int] | None = None,
        cubins: Mapping[str, Path] | None = None,
    ) -> Self:
        """The GPU `index`, for the calling thread; compiles the kernels that neither wheel nor cache has.

        `as_capability` is for tests: the device has the sources and features alone that one of an older capability has,
        so that what it would run is run here; `cubins` are those sources compiled for that one, which this GPU runs.

        Raises:
            DeviceUnavailableError: there is no such GPU, or it or its driver is too old.
            KernelBuildError: kernels had to be compiled and could not be.
        """
        properties, capability = _look_at(index)
        found = dict(cubins or require_cubins(architecture_of(*capability)))
        _use(index)
        if as_capability is not None:
            names = {source.stem for source in sources(architecture_of(*as_capability))}
            found = {stem: path for stem, path in found.items() if stem in names}
            properties |= dict(zip(("major", "minor"), as_capability, strict=True))
        return cls(index, properties, found)

    @property
    def architecture(self) -> str:
        """The architecture as compilers name it: `sm_90a`."""
        return architecture_of(*self.capability)

    def kernel(self, stem: str, name: str, *, shared_bytes: int = 0) -> Kernel:
        """A kernel of `csrc/STEM.cu` by its `extern "C"` name, with `shared_bytes` of dynamic shared memory."""
        if stem not in self._modules:
            self._modules[stem] = Module(self._cubins[stem], may_overlap=self.capability >= _OVERLAP_CAPABILITY)
        return self._modules[stem].kernel(name, shared_bytes=shared_bytes)

    def has(self, stem: str) -> bool:
        """Whether `csrc/STEM.cu` is for this GPU."""
        return stem in self._cubins

    def used_bytes(self) -> int:
        """Memory of this GPU that is in use, by everyone; for a thread that has called `use`."""
        free, total = cupy.cuda.runtime.memGetInfo()
        return total - free

    def use(self) -> None:
        """Makes this the GPU of the calling thread, as each thread that calls its operators must do once."""
        _use(self.index)

    def synchronize(self) -> None:
        with cupy.cuda.Device(self.index) as device:
            device.synchronize()


def gpu_architecture(index: int = 0) -> str:
    """The architecture of GPU `index`, as compilers name it; nothing is compiled or loaded."""
    return architecture_of(*_look_at(index)[1])


def gpu_count() -> int:
    """GPUs that this process can see; raises `DeviceUnavailableError` where there is none."""
    _require_driver()
    return cupy.cuda.runtime.getDeviceCount()


def _look_at(index: int) -> tuple[dict[str, Any], tuple[int, int]]:
    _require_driver()
    require_index(index, count=cupy.cuda.runtime.getDeviceCount())
    properties = cupy.cuda.runtime.getDeviceProperties(index)
    capability = (properties["major"], properties["minor"])
    require_capability(properties["name"].decode(), capability)
    return properties, capability


def _use(index: int) -> None:
    cupy.cuda.Device(index).use()
    cupy.cuda.runtime.free(0)  # makes the context that launches need, which selecting alone may put off


def _require_driver() -> None:
    try:
        (result,) = driver.cuInit(0)
    except RuntimeError as missing:  # cuda-bindings, where the driver's library is not on the machine
        raise DeviceUnavailableError(NO_DRIVER) from missing
    if result == driver.CUresult.CUDA_ERROR_NO_DEVICE:
        raise DeviceUnavailableError(NO_GPU)
    check((result,))
    supported = check(driver.cuDriverGetVersion())
    require_driver(supported=supported, needed=cupy.cuda.runtime.runtimeGetVersion())
