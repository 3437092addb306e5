"""Graphs whose memory was given back and taken again, and weights that were kept on the host meanwhile."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from openinfer_kernels import DeviceMemoryStateError, OutOfDeviceMemoryError

pytestmark = pytest.mark.gpu
ROWS = 3 << 20


@pytest.fixture
def device() -> Any:
    from openinfer_kernels.cuda import Device

    return Device.open()


@pytest.fixture
def memory(device: Any) -> Iterator[Any]:
    from openinfer_kernels.cuda.common.mapped_memory import MappedMemory

    found = MappedMemory(device)
    yield found
    found.close()


def used_mib(device: Any) -> int:
    device.synchronize()
    return device.used_bytes() >> 20


@pytest.mark.whole_gpu
def test_captured_graph_reads_kept_weights_after_its_memory_was_away(device: Any, memory: Any) -> None:
    from openinfer_kernels.cuda.common.graphs import Stream
    from openinfer_kernels.cuda.common.libraries import cupy

    values = np.arange(ROWS, dtype=np.float32)
    before = used_mib(device)
    with memory.of_weights():
        weights = cupy.asarray(values)
    with memory.of_kv():
        kv = cupy.zeros(ROWS, np.float32)
    out = cupy.zeros(ROWS, np.float32)

    def work() -> Any:
        scratch = weights * 2.0  # in memory that is mapped while the stream is captured
        zeros = cupy.zeros(ROWS, np.float32)
        kv[...] = kv + 1.0
        out[...] = scratch + kv + zeros
        return scratch

    stream = Stream(device)
    device.synchronize()
    with stream:
        work()
        with stream.private_pool(memory.scratch_pool()):
            graph, _ = stream.capture(work)
        kv.fill(0)
        graph.launch()
        stream.synchronize()
    np.testing.assert_array_equal(cupy.asnumpy(out), values * 2 + 1)
    awake = used_mib(device)
    for _ in range(3):
        memory.keep_weights()
        memory.give_back()
        memory.give_back()
        assert used_mib(device) <= awake - 3 * (ROWS * 4 >> 20)
        other = cupy.cuda.runtime.malloc(64 << 20)  # takes pages that were ours
        cupy.cuda.runtime.memset(other, 0xFF, 64 << 20)
        memory.take_back()
        cupy.cuda.runtime.free(other)
        with stream:
            graph.launch()
            stream.synchronize()
        np.testing.assert_array_equal(cupy.asnumpy(out), values * 2 + 1)
        np.testing.assert_array_equal(cupy.asnumpy(weights), values)
    assert used_mib(device) - before <= awake - before + 2


def test_weights_that_were_not_kept_are_made_again_in_their_places(device: Any, memory: Any) -> None:
    from openinfer_kernels.cuda.common.libraries import cupy
    from openinfer_kernels.cuda.common.mapped_memory import temporaries

    def load(values: np.ndarray) -> list[Any]:
        with memory.of_weights():
            with temporaries():
                cupy.asarray(values)
            return [cupy.asarray(values), cupy.asarray(values[:100])]

    first = load(np.ones(1000, np.float32))
    places = [each.data.ptr for each in first]
    memory.drop_weights()
    memory.give_back()
    memory.take_back()
    again = load(np.full(1000, 2, np.float32))
    memory.check_weights()
    del first
    assert [each.data.ptr for each in again] == places
    assert cupy.asnumpy(again[1]).tolist() == [2.0] * 100
    memory.drop_weights()
    with pytest.raises(DeviceMemoryStateError, match="array 0"):
        load(np.ones(1001, np.float32))


@pytest.mark.whole_gpu
def test_closed_memory_leaves_the_device_as_it_was(device: Any) -> None:
    from openinfer_kernels.cuda.common.libraries import cupy
    from openinfer_kernels.cuda.common.mapped_memory import MappedMemory

    before = used_mib(device)
    for _ in range(3):  # pages that stayed pinned would be in the way of later memory
        memory = MappedMemory(device)
        with memory.of_weights():
            weights = cupy.full(64 << 20, 7, np.uint8)
        memory.keep_weights()
        memory.give_back()
        memory.take_back()
        assert int(cupy.asnumpy(weights[-1])) == 7
        memory.close()
        del weights
        cupy.cuda.runtime.free(cupy.cuda.runtime.malloc(256 << 20))
    cupy.get_default_memory_pool().free_all_blocks()
    assert used_mib(device) <= before + 8


@pytest.mark.whole_gpu
def test_memory_that_others_took_is_not_taken_in_part(device: Any, memory: Any) -> None:
    from openinfer_kernels.cuda.common.libraries import cupy

    with memory.of_weights():
        weights = cupy.full(64 << 20, 7, np.uint8)
    with memory.of_kv():
        cupy.zeros(1 << 30, np.uint8)
    memory.keep_weights()
    memory.give_back()
    free, _ = cupy.cuda.runtime.memGetInfo()
    other = cupy.cuda.runtime.malloc(free - (512 << 20))
    before = used_mib(device)
    with pytest.raises(OutOfDeviceMemoryError):
        memory.take_back()
    assert used_mib(device) == before
    cupy.cuda.runtime.free(other)
    memory.take_back()
    assert int(cupy.asnumpy(weights).min()) == 7
