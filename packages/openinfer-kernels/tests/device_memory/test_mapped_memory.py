"""`MappedMemory` without a GPU: arrays are bytes of a fake driver's memory, copies go to this machine's."""

import ctypes
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from openinfer_kernels.errors import DeviceMemoryStateError, OutOfDeviceMemoryError
from openinfer_kernels.testing.physical_memory import FakePhysicalMemory

PAGE = 4096
MIB = 1 << 20
TOTAL = 256 * MIB
_TO_DEVICE = 1


class Cupy(ModuleType):
    """As much of CuPy as these modules call, on the memory of a fake driver."""

    def __init__(self, memory: FakePhysicalMemory) -> None:
        super().__init__("cupy")
        self._memory = memory
        self._malloc: Callable[[int], Any] = self._ordinary
        self.freed_blocks = self.ordinary = 0
        stream = SimpleNamespace(ptr=0, synchronize=lambda: None)
        self.cuda = SimpleNamespace(
            PythonFunctionAllocator=_Allocator,
            MemoryPool=lambda malloc: SimpleNamespace(malloc=malloc),
            using_allocator=self._using,
            get_current_stream=lambda: stream,
            Stream=lambda *, non_blocking: stream,
            runtime=SimpleNamespace(
                memcpyAsync=self._copy,
                memsetAsync=lambda at, value, nbytes, _: memory.write(at, bytes([value]) * nbytes),
                hostRegister=lambda *_: None,
                hostUnregister=lambda *_: None,
                CUDARuntimeError=RuntimeError,
            ),
        )

    def get_default_memory_pool(self) -> Any:
        return SimpleNamespace(malloc=self._ordinary, free_all_blocks=self._free_blocks)

    def array(self, nbytes: int) -> "_Array":
        return self._malloc(nbytes)

    def _ordinary(self, nbytes: int) -> Any:
        del nbytes
        self.ordinary += 1
        return _Array(0, None)

    def _free_blocks(self) -> None:
        self.freed_blocks += 1

    @contextmanager
    def _using(self, malloc: Callable[[int], Any]) -> Iterator[None]:
        before, self._malloc = self._malloc, malloc
        yield
        self._malloc = before

    def _copy(self, target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
        del stream
        if kind == _TO_DEVICE:
            self._memory.write(target, ctypes.string_at(source, nbytes))
        else:
            ctypes.memmove(target, self._memory.read(source, nbytes), nbytes)


class _Array:
    def __init__(self, ptr: int, free: Callable[[], None] | None) -> None:
        self.ptr = ptr
        self._free = free

    def drop(self) -> None:
        if self._free is not None:
            self._free()


class _Allocator:
    def __init__(self, malloc: Callable[[int, int], int], free: Callable[[int, int], None]) -> None:
        self._malloc, self._free = malloc, free

    def malloc(self, nbytes: int) -> _Array:
        ptr = self._malloc(nbytes, 0)
        return _Array(ptr, lambda: self._free(ptr, 0))


@pytest.fixture
def memory() -> FakePhysicalMemory:
    return FakePhysicalMemory(total_bytes=TOTAL, granularity_bytes=PAGE)


@pytest.fixture
def cupy(memory: FakePhysicalMemory) -> Iterator[Cupy]:
    found = Cupy(memory)
    stand_ins = {"cupy": found, "cuda.bindings.driver": ModuleType("cuda.bindings.driver")}
    stand_ins["ml_dtypes"] = ModuleType("ml_dtypes")
    stand_ins["ml_dtypes"].bfloat16 = "u2"  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        for name in [each for each in sys.modules if each.startswith("openinfer_kernels.cuda")]:
            patch.delitem(sys.modules, name)
        for name, module in stand_ins.items():
            patch.setitem(sys.modules, name, module)
        yield found
        for name in [each for each in sys.modules if each.startswith("openinfer_kernels.cuda")]:
            del sys.modules[name]


@pytest.fixture
def mapped(cupy: Cupy, memory: FakePhysicalMemory) -> Any:
    module = importlib.import_module("openinfer_kernels.cuda.common.mapped_memory")
    device = SimpleNamespace(memory_bytes=TOTAL, synchronize=lambda: None, use=lambda: None, index=0)
    return module.MappedMemory(device, memory)


def load(cupy: Cupy, mapped: Any, sizes: tuple[int, ...]) -> list[_Array]:
    with mapped.of_weights():
        return [cupy.array(size) for size in sizes]


def test_kept_weights_come_back_and_the_rest_is_zero(cupy: Cupy, mapped: Any, memory: FakePhysicalMemory) -> None:
    (weights,) = load(cupy, mapped, (3 * MIB,))
    with mapped.of_kv():
        kv = cupy.array(MIB)
    scratch = mapped.scratch_pool().malloc(MIB)
    for array in (weights, kv, scratch):
        memory.write(array.ptr + 5, b"abc")
    for _ in range(3):
        mapped.keep_weights()
        mapped.give_back()
        assert memory.used_bytes == 0
        mapped.take_back()
        assert memory.read(weights.ptr + 5, 3) == b"abc"
        assert memory.read(kv.ptr + 5, 3) == memory.read(scratch.ptr + 5, 3) == bytes(3)
    assert cupy.freed_blocks == 3


def test_weights_are_kept_as_they_are_at_the_last_time(cupy: Cupy, mapped: Any, memory: FakePhysicalMemory) -> None:
    (weights,) = load(cupy, mapped, (MIB,))
    memory.write(weights.ptr, b"old")
    mapped.keep_weights()
    mapped.give_back()
    mapped.take_back()
    memory.write(weights.ptr, b"new")
    mapped.keep_weights()
    mapped.give_back()
    mapped.take_back()
    assert memory.read(weights.ptr, 3) == b"new"


def test_a_drafter_is_after_each_sleep_what_it_was_when_it_was_made(
    cupy: Cupy, mapped: Any, memory: FakePhysicalMemory
) -> None:
    (weights,) = load(cupy, mapped, (3 * MIB,))
    with mapped.of_drafter():
        drafter = cupy.array(5 * MIB)
        memory.write(drafter.ptr + 7, b"made")
    for keeps_weights in (True, False, True):
        memory.write(drafter.ptr + 7, b"used")
        if keeps_weights:
            mapped.keep_weights()
        else:
            mapped.drop_weights()
        mapped.give_back()
        assert memory.used_bytes == 0
        mapped.take_back()
        assert memory.read(drafter.ptr + 7, 4) == b"made"
        if not keeps_weights:
            assert load(cupy, mapped, (3 * MIB,))[0].ptr == weights.ptr
    mapped.close()
    assert (memory.used_bytes, memory.reserved_bytes) == (0, 0)


def test_a_drafter_that_is_made_again_lies_where_it_was(cupy: Cupy, mapped: Any, memory: FakePhysicalMemory) -> None:
    def make(sizes: tuple[int, ...], written: bytes) -> list[Any]:
        with mapped.of_drafter():
            found = [cupy.array(size) for size in sizes]
            memory.write(found[0].ptr, written)
        return found

    first = make((MIB, 3 * MIB), b"old")
    again = make((MIB, 3 * MIB), b"new")
    assert [each.ptr for each in again] == [each.ptr for each in first]
    del again  # the first ones are in use
    for sizes in ((MIB,), (2 * MIB, 3 * MIB), (MIB, 3 * MIB, MIB)):
        with pytest.raises(DeviceMemoryStateError, match=r"array|arrays"):
            make(sizes, b"bad")
        assert memory.read(first[0].ptr, 3) == b"new", "as it was before it"
    mapped.give_back()
    mapped.take_back()
    assert memory.read(first[0].ptr, 3) == b"new"
    assert [each.ptr for each in make((MIB, 3 * MIB), b"end")] == [each.ptr for each in first]


def test_dropped_weights_are_not_brought_back(cupy: Cupy, mapped: Any, memory: FakePhysicalMemory) -> None:
    (weights,) = load(cupy, mapped, (MIB,))
    memory.write(weights.ptr, b"old")
    mapped.keep_weights()
    mapped.drop_weights()
    mapped.give_back()
    mapped.take_back()
    assert memory.read(weights.ptr, 3) != b"old"


def test_all_or_nothing_is_taken_back(cupy: Cupy, mapped: Any, memory: FakePhysicalMemory) -> None:
    (weights,) = load(cupy, mapped, (3 * MIB,))
    with mapped.of_kv():
        cupy.array(100 * MIB)
    memory.write(weights.ptr, b"abc")
    mapped.keep_weights()
    mapped.give_back()
    memory.taken_bytes = TOTAL - 64 * MIB
    for _ in range(2):
        with pytest.raises(OutOfDeviceMemoryError):
            mapped.take_back()
        assert memory.used_bytes == 0
    memory.taken_bytes = 0
    mapped.take_back()
    assert memory.read(weights.ptr, 3) == b"abc"


def test_temporaries_are_no_weights(cupy: Cupy, mapped: Any) -> None:
    temporaries = importlib.import_module("openinfer_kernels.cuda.common.mapped_memory").temporaries
    first = [each.ptr for each in load(cupy, mapped, (MIB, 100))]
    mapped.drop_weights()
    with mapped.of_weights():
        with temporaries():
            cupy.array(777)
        again = [cupy.array(MIB).ptr, cupy.array(100).ptr]
    mapped.check_weights()
    assert (again, cupy.ordinary) == (first, 1)


def test_other_weights_than_the_first_are_refused(cupy: Cupy, mapped: Any) -> None:
    load(cupy, mapped, (MIB, 100))
    mapped.drop_weights()
    load(cupy, mapped, (MIB,))
    with pytest.raises(DeviceMemoryStateError):
        mapped.check_weights()


@pytest.mark.parametrize("is_asleep", [False, True])
def test_closed_memory_leaves_nothing_whenever_its_arrays_go(
    cupy: Cupy, mapped: Any, memory: FakePhysicalMemory, *, is_asleep: bool
) -> None:
    (weights,) = load(cupy, mapped, (MIB,))
    mapped.keep_weights()
    if is_asleep:
        mapped.give_back()
    mapped.close()
    mapped.close()
    assert (memory.used_bytes, memory.reserved_bytes) == (0, 0)
    weights.drop()
