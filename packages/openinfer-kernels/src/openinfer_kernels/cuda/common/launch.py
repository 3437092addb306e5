"""Loading cubins and launching their kernels through the driver API.

CuPy owns memory, streams and graphs; launches go through `cuLaunchKernelEx`, which CuPy lacks, because a decode step
needs programmatic dependent launch: the next kernel starts and prefetches its weights while the last one drains.
"""

import ctypes
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openinfer_kernels.cuda.common.libraries import cupy, driver
from openinfer_kernels.errors import CudaCallError

_FREE_SHARED_BYTES = 48 * 1024
"""Dynamic shared memory that a kernel may use without asking first."""
_ALL_PERCENT = 100
"""Of the memory that L1 cache and shared memory have in common, as shared memory."""

_COMPOUND: Any = (ctypes.Structure, ctypes.Array)
"""Arguments that are copied whole."""


def check(result: tuple[Any, ...]) -> Any:
    """The value of a driver call; raises `CudaCallError` with the driver's name of the error and its text."""
    error, *values = result
    if error != driver.CUresult.CUDA_SUCCESS:
        text = driver.cuGetErrorString(error)[1]
        raise CudaCallError(f"the CUDA driver answered {error.name}: {text.decode() if text else 'no text'}")
    return values[0] if values else None


class Kernel:
    """One kernel of a loaded module; any thread may launch it, on a stream of its own."""

    def __init__(self, function: Any, *, shared_bytes: int, may_overlap: bool) -> None:
        self._function = function
        attributes = driver.CUfunction_attribute
        if shared_bytes > _FREE_SHARED_BYTES:
            attribute = attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            check(driver.cuFuncSetAttribute(function, attribute, shared_bytes))
        if may_overlap:
            # Blocks of two kernels run on a multiprocessor together only if they divide its L1 cache alike. On older
            # GPUs they never do, and attention reads through that cache.
            attribute = attributes.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
            check(driver.cuFuncSetAttribute(function, attribute, _ALL_PERCENT))
        self._shared_bytes = shared_bytes
        self._may_overlap = may_overlap
        self._configs: dict[tuple[bool, int], Any] = {}
        self._arguments: _Arguments | None = None
        # Arguments and configuration are filled anew by each launch; threads that load weights launch what the thread
        # that made them launches.
        self._launching = threading.Lock()

    def __call__(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        arguments: Sequence[Any],
        *,
        overlap: bool = False,
        cluster: int = 1,
    ) -> None:
        """Launches on CuPy's current stream.

        Args:
            grid: blocks.
            block: threads.
            arguments: CuPy arrays (their pointers), None (a null pointer), ctypes values, structures or arrays; in the
                kernel's order, of the types that it declares, the same at every launch.
            overlap: programmatic dependent launch: the kernel may start before the one ahead of it has ended, and
                itself waits (`griddepcontrol.wait`) before it touches what that one touches. On GPUs before Hopper it
                is an ordinary launch.
            cluster: blocks that run side by side and reach each other's shared memory; divides the grid's first size.
        """
        stream = cupy.cuda.get_current_stream().ptr
        with self._launching:
            if self._arguments is None:
                self._arguments = _Arguments(arguments)
            self._arguments.fill(arguments)
            config = self._config(overlap, cluster)
            config.gridDimX, config.gridDimY, config.gridDimZ = grid
            config.blockDimX, config.blockDimY, config.blockDimZ = block
            config.hStream = stream
            check(driver.cuLaunchKernelEx(config, self._function, self._arguments.address, 0))

    def most_clusters(self, cluster: int, *, threads: int) -> int:
        """Clusters of at least two blocks that the device runs at a time: fewer than its multiprocessors would hold."""
        with self._launching:
            config = self._config(overlap=False, cluster=cluster)
            config.gridDimX, config.gridDimY, config.gridDimZ = cluster, 1, 1
            config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
            return check(driver.cuOccupancyMaxActiveClusters(self._function, config))

    def _config(self, overlap: bool, cluster: int) -> Any:  # noqa: FBT001 - part of a key
        """A launch's configuration but for its sizes and stream: attributes take long to set."""
        key = overlap and self._may_overlap, cluster
        if key not in self._configs:
            self._configs[key] = _config(self._shared_bytes, overlap=key[0], cluster=cluster)
        return self._configs[key]


class Module:
    """A loaded cubin."""

    def __init__(self, path: Path, *, may_overlap: bool) -> None:
        self._module = check(driver.cuModuleLoadData(path.read_bytes()))
        self._may_overlap = may_overlap

    def kernel(self, name: str, *, shared_bytes: int = 0) -> Kernel:
        function = check(driver.cuModuleGetFunction(self._module, name.encode()))
        return Kernel(function, shared_bytes=shared_bytes, may_overlap=self._may_overlap)


class _Arguments:
    """Storage of a kernel's arguments, filled by each launch: making it anew takes as long as the launch itself."""

    def __init__(self, arguments: Sequence[Any]) -> None:
        self._slots = [_slot(argument) for argument in arguments]
        self._pointers = (ctypes.c_void_p * len(self._slots))(*map(ctypes.addressof, self._slots))
        self.address = ctypes.addressof(self._pointers)

    def fill(self, arguments: Sequence[Any]) -> None:
        for slot, argument in zip(self._slots, arguments, strict=True):
            if isinstance(argument, cupy.ndarray):
                slot.value = argument.data.ptr
            elif isinstance(argument, _COMPOUND):
                ctypes.memmove(ctypes.addressof(slot), ctypes.addressof(argument), ctypes.sizeof(slot))
            else:
                slot.value = None if argument is None else argument.value


def _slot(argument: Any) -> Any:
    is_pointer = argument is None or isinstance(argument, cupy.ndarray)
    return ctypes.c_void_p() if is_pointer else type(argument)()


def _config(shared_bytes: int, *, overlap: bool, cluster: int) -> Any:
    attributes: list[Any] = []
    if overlap:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        attributes.append(attribute)
    if cluster > 1:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        size = attribute.value.clusterDim
        size.x, size.y, size.z = cluster, 1, 1
        attributes.append(attribute)
    config = driver.CUlaunchConfig()
    config.sharedMemBytes = shared_bytes
    config.attrs, config.numAttrs = attributes, len(attributes)
    return config
