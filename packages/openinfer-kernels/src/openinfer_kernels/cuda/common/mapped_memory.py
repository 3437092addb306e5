"""`MappedMemory`: weights, a drafter, KV and the scratch of graphs at addresses that stay while an engine sleeps.

Captured graphs hold addresses, so these must not change. Each purpose has a range of addresses of its own, reserved
once; the memory that backs it is given back and taken again (`openinfer_kernels.device_memory`). The driver's calls for
that are none of CuPy's, whose pools sit on top. Memory that other processes or NCCL reach is never made here: what they
have been given would be gone.
"""

import weakref
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.cuda.common.host_copy import HostCopy
from openinfer_kernels.cuda.common.launch import check
from openinfer_kernels.cuda.common.libraries import cupy, driver
from openinfer_kernels.device_memory.arena import Arena, PlacesArrays, RepeatedArena
from openinfer_kernels.device_memory.mapped_range import MappedRange
from openinfer_kernels.device_memory.physical import PhysicalMemory
from openinfer_kernels.errors import DeviceMemoryStateError, OutOfDeviceMemoryError

_RESERVED = 2
"""Times a device's memory: addresses of each purpose, of which gaps between arrays take some."""


class DriverMemory:
    """Implements `PhysicalMemory` by the driver's virtual memory management, for one GPU."""

    def __init__(self, device: Device) -> None:
        location = driver.CUmemLocation()
        location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = device.index
        self._properties = driver.CUmemAllocationProp()
        self._properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.location = location
        self._access = driver.CUmemAccessDesc()
        self._access.location = location
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        flag = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        self._granularity_bytes: int = check(driver.cuMemGetAllocationGranularity(self._properties, flag))

    @property
    def granularity_bytes(self) -> int:
        return self._granularity_bytes

    def reserve(self, nbytes: int) -> int:
        return int(check(driver.cuMemAddressReserve(nbytes, self._granularity_bytes, 0, 0)))

    def release(self, address: int, nbytes: int) -> None:
        check(driver.cuMemAddressFree(address, nbytes))

    def map(self, address: int, nbytes: int) -> None:
        error, handle = driver.cuMemCreate(nbytes, self._properties, 0)
        if error == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise OutOfDeviceMemoryError(f"the GPU has no {nbytes / (1 << 30):.2f} GiB of free memory")
        check((error,))
        try:
            check(driver.cuMemMap(address, nbytes, 0, handle, 0))
        finally:
            check(driver.cuMemRelease(handle))  # what is mapped stays until it is unmapped
        try:
            check(driver.cuMemSetAccess(address, nbytes, [self._access], 1))
        except BaseException:
            check(driver.cuMemUnmap(address, nbytes))
            raise

    def unmap(self, address: int, nbytes: int) -> None:
        check(driver.cuMemUnmap(address, nbytes))


class MappedMemory:
    """The memory of one GPU that an engine gives back asleep; for one thread at a time.

    Args:
        device: that it is of.
        memory: the driver's; None: of the device.
    """

    def __init__(self, device: Device, memory: PhysicalMemory | None = None) -> None:
        self._device = device
        memory = DriverMemory(device) if memory is None else memory
        reserved_bytes = _RESERVED * device.memory_bytes
        ranges = (MappedRange(memory, reserved_bytes) for _ in range(4))
        self._weights, self._drafter, self._kv, self._scratch = ranges
        self._repeated = RepeatedArena(Arena(self._weights))
        self._repeated_drafter = RepeatedArena(Arena(self._drafter))
        self._kv_arena = Arena(self._kv)
        self._scratch_arena = Arena(self._scratch)
        self._copy, self._drafter_copy = HostCopy(device), HostCopy(device)
        self._is_kept = self._has_drafter = False

    # --- what arrays are made in ------------------------------------------------------------------------

    def of_weights(self) -> AbstractContextManager[None]:
        """Within it the calling thread's arrays are weights; what `temporaries` makes is none."""
        return _allocating(_allocator(self._repeated))

    @contextmanager
    def of_drafter(self) -> Generator[None]:
        """Within it the calling thread's arrays are a drafter's: `take_back` makes them what they are at its end.

        From the second time on they take the places of the first ones, array by array, though these are still in use.

        Raises:
            MemoryError: the host has no room for a copy of them.
            DeviceMemoryStateError: they are others than the first ones, which are again what they were.
        """
        is_again = self._has_drafter
        if is_again:
            self._repeated_drafter.restart()
        try:
            with _allocating(_allocator(self._repeated_drafter)):
                yield
            self._repeated_drafter.check_complete()
        except BaseException:
            if is_again:
                self._device.synchronize()
                self._drafter_copy.begin_restore(self._drafter.begin)
                self._device.synchronize()
            raise
        self._device.synchronize()
        self._drafter_copy.save(self._drafter.begin, self._repeated_drafter.used_bytes)
        self._has_drafter = True

    def of_kv(self) -> AbstractContextManager[None]:
        """Within it the calling thread's arrays are KV or recurrent states: zero after each `take_back`."""
        return _allocating(_allocator(self._kv_arena))

    def scratch_pool(self) -> Any:
        """A pool of CuPy's for what graphs work in: void between steps, zero after each `take_back`."""
        return cupy.cuda.MemoryPool(_allocator(self._scratch_arena))

    # --- weights that change ----------------------------------------------------------------------------

    def drop_weights(self) -> None:
        """What `of_weights` makes next takes the places of what it has made, array by array."""
        self._repeated.restart()
        self._is_kept = False

    def check_weights(self) -> None:
        """Raises `DeviceMemoryStateError` unless all of them have been made again."""
        self._repeated.check_complete()

    def keep_weights(self) -> None:
        """Copies the weights into pinned memory of the host, from where `take_back` brings them.

        Raises:
            MemoryError: the host has not as much.
        """
        self._device.synchronize()
        self._copy.save(self._weights.begin, self._repeated.used_bytes)
        self._is_kept = True

    # --- sleep ------------------------------------------------------------------------------------------

    def give_back(self) -> None:
        """Gives all of it back, and what CuPy keeps for later; waits for the device first. Idempotent."""
        self._device.synchronize()
        for each in self._ranges:
            each.unmap()
        cupy.get_default_memory_pool().free_all_blocks()

    def take_back(self) -> None:
        """Takes all of it again: kept weights and the drafter's are there, other ones are void, the rest is zero.

        Raises:
            OutOfDeviceMemoryError: other processes hold what is needed; nothing was taken.
        """
        # The driver clears memory that was given back in the background: until that has ended, who takes it waits, and
        # the more so while a copy runs (0.56 s for 15 and 100 GiB; 0.30 half a second later, which the copy takes).
        try:
            self._weights.map_again()
            if self._is_kept:
                self._copy.begin_restore(self._weights.begin)
            self._drafter.map_again()
            if self._drafter.size_bytes:
                self._drafter_copy.begin_restore(self._drafter.begin)
            for each in (self._kv, self._scratch):
                each.map_again()
        except BaseException:
            self._device.synchronize()
            for each in self._ranges:
                each.unmap()
            raise
        for each in (self._kv, self._scratch):
            if each.size_bytes:
                cupy.cuda.runtime.memsetAsync(each.begin, 0, each.size_bytes, cupy.cuda.get_current_stream().ptr)
        self._is_kept = False
        self._device.synchronize()

    def close(self) -> None:
        """Gives memory and addresses back for good: arrays that are still there must not be used. Idempotent."""
        self._device.use()
        self._device.synchronize()
        for each in self._ranges:
            each.close()
        self._copy.close()
        self._drafter_copy.close()

    @property
    def _ranges(self) -> tuple[MappedRange, ...]:
        return self._weights, self._drafter, self._kv, self._scratch


def temporaries() -> AbstractContextManager[None]:
    """Within it the calling thread's arrays come from CuPy's own pool, also while weights are loaded."""
    return _allocating(cupy.get_default_memory_pool().malloc)


class _Allocator:
    """What CuPy calls for an array that lies in an arena, and when it is gone.

    The collector may find a closed engine as garbage, arrays, arenas and this: it clears them in any order, and CuPy
    calls `free` from an array's deallocation. So this is no closure, which would be called without what it closes over
    (a crash); it sees an arena that is garbage as none, since weak references go first.
    """

    __slots__ = ("_places",)

    def __init__(self, places: PlacesArrays) -> None:
        self._places = weakref.ref(places)

    def allocate(self, nbytes: int, device: int) -> int:
        del device
        places = self._places()
        if places is None:
            raise DeviceMemoryStateError("the arena of an array is gone")
        return places.allocate(nbytes)

    def free(self, address: int, device: int) -> None:
        del device
        reference = getattr(self, "_places", None)
        places = None if reference is None else reference()
        if places is not None:
            places.free(address)


def _allocator(places: PlacesArrays) -> Callable[[int], Any]:
    """An allocator of CuPy's; the caller keeps the arena."""
    allocator = _Allocator(places)
    return cupy.cuda.PythonFunctionAllocator(allocator.allocate, allocator.free).malloc


@contextmanager
def _allocating(malloc: Callable[[int], Any]) -> Generator[None]:
    with cupy.cuda.using_allocator(malloc):
        yield
