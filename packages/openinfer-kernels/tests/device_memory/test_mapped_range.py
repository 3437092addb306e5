"""Ranges and arenas against a driver that refuses what a real one refuses, in any order of calls."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from openinfer_kernels.device_memory.arena import ALIGNMENT_BYTES, Arena, RepeatedArena
from openinfer_kernels.device_memory.mapped_range import MappedRange, RangeState
from openinfer_kernels.errors import DeviceMemoryStateError, OutOfDeviceMemoryError
from openinfer_kernels.testing.physical_memory import FakePhysicalMemory

PAGE = 4096
TOTAL = 64 * PAGE


@pytest.fixture
def memory() -> FakePhysicalMemory:
    return FakePhysicalMemory(total_bytes=TOTAL, granularity_bytes=PAGE)


def test_range_has_its_addresses_when_its_memory_is_back(memory: FakePhysicalMemory) -> None:
    addresses = MappedRange(memory, 10 * PAGE)
    addresses.grow_to(PAGE + 1)
    addresses.grow_to(3 * PAGE)
    begin = addresses.begin
    memory.write(begin, b"weights")
    addresses.unmap()
    assert memory.used_bytes == 0
    addresses.map_again()
    assert (addresses.begin, addresses.size_bytes, memory.used_bytes) == (begin, 3 * PAGE, 3 * PAGE)
    assert memory.read(begin, 7) != b"weights"


def test_range_comes_back_in_one_call_however_often_it_grew(memory: FakePhysicalMemory) -> None:
    addresses = MappedRange(memory, 10 * PAGE)
    for pages in range(1, 8):
        addresses.grow_to(pages * PAGE)
    memory.calls.clear()
    for _ in range(2):
        addresses.unmap()
        addresses.map_again()
    assert memory.calls == ["unmap", "map"] * 2


def test_memory_that_others_took_leaves_a_range_unmapped(memory: FakePhysicalMemory) -> None:
    addresses = MappedRange(memory, 10 * PAGE)
    addresses.grow_to(4 * PAGE)
    addresses.unmap()
    memory.taken_bytes = TOTAL - PAGE
    with pytest.raises(OutOfDeviceMemoryError):
        addresses.map_again()
    assert addresses.state is RangeState.UNMAPPED
    memory.taken_bytes = 0
    addresses.map_again()
    assert addresses.state is RangeState.MAPPED


def test_range_grows_no_further_than_it_was_reserved(memory: FakePhysicalMemory) -> None:
    addresses = MappedRange(memory, 2 * PAGE)
    with pytest.raises(OutOfDeviceMemoryError, match="reserved"):
        addresses.grow_to(2 * PAGE + 1)
    assert addresses.size_bytes == 0


@pytest.mark.parametrize("use", [lambda each: each.grow_to(PAGE), lambda each: each.map_again()])
def test_closed_range_is_not_used_again(memory: FakePhysicalMemory, use) -> None:
    addresses = MappedRange(memory, 2 * PAGE)
    addresses.close()
    addresses.close()
    with pytest.raises(DeviceMemoryStateError):
        use(addresses)
    assert memory.reserved_bytes == 0


def test_nothing_is_placed_in_memory_that_is_given_back(memory: FakePhysicalMemory) -> None:
    addresses = MappedRange(memory, 10 * PAGE)
    arena = Arena(addresses, growth_bytes=PAGE)
    arena.allocate(PAGE)
    addresses.unmap()
    with pytest.raises(DeviceMemoryStateError):
        arena.allocate(20 * PAGE)


def test_arena_takes_the_last_of_a_device_as_it_is_needed(memory: FakePhysicalMemory) -> None:
    memory.taken_bytes = TOTAL - 5 * PAGE
    arena = Arena(MappedRange(memory, 2 * TOTAL), growth_bytes=4 * PAGE)
    for pages in (4, 1):
        arena.allocate(pages * PAGE)
    assert memory.used_bytes == 5 * PAGE
    with pytest.raises(OutOfDeviceMemoryError):
        arena.allocate(1)
    arena.check_integrity()


def test_gap_at_the_end_begins_what_does_not_fit_into_it(memory: FakePhysicalMemory) -> None:
    arena = Arena(MappedRange(memory, 40 * PAGE), growth_bytes=PAGE)
    first = arena.allocate(2 * PAGE)
    arena.free(first)
    assert arena.allocate(3 * PAGE) == first
    assert arena.used_bytes == 3 * PAGE


def test_address_is_freed_once(memory: FakePhysicalMemory) -> None:
    arena = Arena(MappedRange(memory, 10 * PAGE), growth_bytes=PAGE)
    address = arena.allocate(100)
    arena.free(address)
    with pytest.raises(DeviceMemoryStateError):
        arena.free(address)


SIZES = (100, 3 * PAGE, 512, 0)


def _passed(memory: FakePhysicalMemory) -> tuple[RepeatedArena, list[int]]:
    arena = RepeatedArena(Arena(MappedRange(memory, 40 * PAGE), growth_bytes=PAGE))
    return arena, [arena.allocate(size) for size in SIZES]


def test_arrays_come_again_where_they_were(memory: FakePhysicalMemory) -> None:
    arena, first = _passed(memory)
    for _ in range(3):
        arena.restart()
        assert [arena.allocate(size) for size in SIZES] == first
        arena.check_complete()
        for address in first:  # of the pass before, whose arrays are dropped late
            arena.free(address)


def test_what_was_freed_in_the_first_pass_is_shared_again(memory: FakePhysicalMemory) -> None:
    arena = RepeatedArena(Arena(MappedRange(memory, 40 * PAGE), growth_bytes=PAGE))

    def load() -> list[int]:
        temporary = arena.allocate(2 * PAGE)
        arena.free(temporary)
        return [temporary, arena.allocate(2 * PAGE), arena.allocate(PAGE)]

    first = load()
    assert first[0] == first[1]
    arena.restart()
    assert load() == first


def test_another_array_in_a_place_is_refused_by_its_number(memory: FakePhysicalMemory) -> None:
    arena, _ = _passed(memory)
    arena.restart()
    arena.allocate(SIZES[0])
    with pytest.raises(DeviceMemoryStateError, match=r"array 1 .* has 512 bytes, and had 12288"):
        arena.allocate(512)


def test_one_array_more_or_less_is_refused(memory: FakePhysicalMemory) -> None:
    arena, _ = _passed(memory)
    arena.restart()
    for size in SIZES[:-1]:
        arena.allocate(size)
    with pytest.raises(DeviceMemoryStateError, match="3 arrays of weights were made, and 4"):
        arena.check_complete()
    arena.allocate(SIZES[-1])
    with pytest.raises(DeviceMemoryStateError, match="array 4"):
        arena.allocate(100)


class SleepingArena(RuleBasedStateMachine):
    """An arena on a device that another process takes memory of, which sleeps and wakes in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = FakePhysicalMemory(total_bytes=TOTAL, granularity_bytes=PAGE)
        self.addresses = MappedRange(self.memory, 2 * TOTAL)
        self.arena = Arena(self.addresses, growth_bytes=3 * PAGE)
        self.arrays: dict[int, int] = {}

    @property
    def is_awake(self) -> bool:
        return self.addresses.state is RangeState.MAPPED

    @precondition(lambda self: self.is_awake)
    @rule(nbytes=st.integers(1, 6 * PAGE))
    def allocate(self, nbytes: int) -> None:
        before = self.memory.used_bytes
        try:
            address = self.arena.allocate(nbytes)
        except OutOfDeviceMemoryError:
            assert self.memory.used_bytes == before
            return
        assert address % ALIGNMENT_BYTES == 0
        for begin, size in self.arrays.items():
            assert address + nbytes <= begin or begin + size <= address
        self.arrays[address] = nbytes
        self.memory.write(address + nbytes - 1, b"x")

    @precondition(lambda self: self.arrays)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        address = data.draw(st.sampled_from(sorted(self.arrays)))
        del self.arrays[address]
        self.arena.free(address)  # also asleep: Python drops arrays when it likes

    @rule()
    def sleep(self) -> None:
        self.addresses.unmap()
        assert self.memory.used_bytes == 0

    @rule(taken=st.sampled_from([0, TOTAL // 2, TOTAL]))
    def wake(self, taken: int) -> None:
        if self.is_awake:
            return
        self.memory.taken_bytes = taken
        try:
            self.addresses.map_again()
        except OutOfDeviceMemoryError:
            assert self.memory.used_bytes == 0
        else:
            for address, nbytes in self.arrays.items():
                self.memory.write(address, b"x")
                self.memory.write(address + nbytes - 1, b"x")
        self.memory.taken_bytes = 0

    @invariant()
    def arrays_and_gaps_cover_the_arena(self) -> None:
        self.arena.check_integrity()

    def teardown(self) -> None:
        self.addresses.close()
        assert (self.memory.used_bytes, self.memory.reserved_bytes) == (0, 0)


TestSleepingArena = SleepingArena.TestCase
