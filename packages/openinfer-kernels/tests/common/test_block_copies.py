"""Blocks of a pool on a GPU, copied out and in by several threads, and the sums that the GPU makes of them."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from openinfer_kernels import ArrayMismatchError
from openinfer_kernels.errors import OutOfDeviceMemoryError

pytestmark = pytest.mark.gpu

BLOCK_BYTES, NUM_BLOCKS = 48 * 1024, 150


def expected_sum(block: np.ndarray) -> bytes:
    """As `openinfer_kv_cache.BlockMover` says, in Python's numbers."""
    plain = weighted = 0
    for index, word in enumerate(block.view("<u8").tolist()):
        x = (word + (index + 1) * 0x9E3779B97F4A7C15) % 2**64
        for multiplier in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
            x = (x ^ (x >> 33)) * multiplier % 2**64
        x ^= x >> 33
        plain, weighted = plain + x, weighted + x * (2 * index + 1)
    return (plain % 2**64).to_bytes(8, "little") + (weighted % 2**64).to_bytes(8, "little")


@pytest.mark.parametrize("scattered", [False, True], ids=["neighbours", "scattered"])
@pytest.mark.parametrize("locked", [False, True], ids=["pageable", "locked"])
def test_blocks_go_out_and_come_back_with_their_sums(locked: bool, scattered: bool) -> None:
    import mmap

    from openinfer_kernels.cuda import Device
    from openinfer_kernels.cuda.common.block_copies import DevicePool
    from openinfer_kernels.cuda.common.libraries import cupy

    device = Device.open()
    host = np.random.default_rng(0).integers(0, 256, (NUM_BLOCKS, BLOCK_BYTES), np.uint8)
    source = DevicePool(cupy.asarray(host), device)
    target_array = cupy.zeros_like(cupy.asarray(host))
    target = DevicePool(target_array, device)
    cupy.cuda.Device(0).synchronize()
    arena = memoryview(mmap.mmap(-1, NUM_BLOCKS * BLOCK_BYTES))
    if locked:
        source.lock([arena])
    order = np.random.default_rng(1).permutation(NUM_BLOCKS) if scattered else np.arange(NUM_BLOCKS)
    places = [arena[index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES] for index in order.tolist()]
    quarters = [slice(begin, begin + 40) for begin in range(0, NUM_BLOCKS, 40)]

    def copy_out(part: slice) -> list[bytes]:
        return source.blocks[0].mover.copy_out(source.blocks[part], places[part])

    def copy_in(part: slice) -> list[bytes]:
        return target.blocks[0].mover.copy_in(target.blocks[part], places[part])

    with ThreadPoolExecutor(4) as threads:
        out = list(threads.map(copy_out, quarters))
        assert np.array_equal(np.frombuffer(arena, np.uint8).reshape(host.shape)[order], host)
        back = list(threads.map(copy_in, quarters))
    source.unlock()
    source.unlock()
    assert np.array_equal(cupy.asnumpy(target_array), host)
    assert out == back
    sums = [one for part in out for one in part]
    assert len(set(sums)) == NUM_BLOCKS
    for index in (0, 63, 64, NUM_BLOCKS - 1):
        assert sums[index] == expected_sum(host[index])


@pytest.mark.parametrize("scattered", [False, True], ids=["neighbours", "scattered"])
def test_blocks_go_to_a_tiers_own_memory_and_come_back_with_their_sums(scattered: bool) -> None:
    from openinfer_kernels.cuda import Device
    from openinfer_kernels.cuda.common.block_copies import DevicePool
    from openinfer_kernels.cuda.common.libraries import cupy

    host = np.random.default_rng(0).integers(0, 256, (NUM_BLOCKS, BLOCK_BYTES), np.uint8)
    array = cupy.asarray(host)
    pool = DevicePool(array, Device.open())
    cupy.cuda.Device(0).synchronize()
    memory = pool.allocate(NUM_BLOCKS * BLOCK_BYTES)
    order = np.random.default_rng(1).permutation(NUM_BLOCKS) if scattered else np.arange(NUM_BLOCKS)
    offsets = [index * BLOCK_BYTES for index in order.tolist()]
    out = memory.copy_out(pool.blocks, offsets)
    array[:] = 0
    cupy.cuda.Device(0).synchronize()
    back = memory.copy_in(pool.blocks[:-1], offsets[1:])  # each block has its neighbour's bytes
    assert np.array_equal(cupy.asnumpy(array), np.concatenate([host[1:], np.zeros_like(host[:1])]))
    assert back == out[1:]
    assert [out[index] for index in (0, NUM_BLOCKS - 1)] == [expected_sum(host[index]) for index in (0, -1)]
    assert len(cupy.cuda.runtime.ipcGetMemHandle(memory.address)) > 0
    memory.close()
    memory.close()


def test_memory_for_a_tier_that_is_not_there_is_refused() -> None:
    from openinfer_kernels.cuda import Device
    from openinfer_kernels.cuda.common.block_copies import DevicePool
    from openinfer_kernels.cuda.common.libraries import cupy

    device = Device.open()
    pool = DevicePool(cupy.zeros((4, 1024), np.uint8), device)
    with pytest.raises(OutOfDeviceMemoryError, match="for a tier"):
        pool.allocate(2 * device.memory_bytes)


def test_blocks_that_are_no_whole_pieces_are_refused() -> None:
    from openinfer_kernels.cuda import Device
    from openinfer_kernels.cuda.common.block_copies import DevicePool
    from openinfer_kernels.cuda.common.libraries import cupy

    with pytest.raises(ArrayMismatchError, match="whole pieces of 16"):
        DevicePool(cupy.zeros((4, 1000), np.uint8), Device.open())


def test_pieces_of_slots_go_out_and_come_back_beside_blocks() -> None:
    from openinfer_kernels.cuda import Device
    from openinfer_kernels.cuda.common.block_copies import DevicePool
    from openinfer_kernels.cuda.common.libraries import cupy

    device = Device.open()
    blocks = np.zeros((4, 1024), np.uint8)
    host = np.random.default_rng(0).integers(0, 256, (3, 2 * 1024), np.uint8)
    slots = cupy.asarray(host)
    pool = DevicePool(cupy.asarray(blocks), device, slots=slots)
    cupy.cuda.Device(0).synchronize()
    arena = memoryview(bytearray(2 * 1024))
    places = [arena[:1024], arena[1024:]]
    sums = pool.blocks[0].mover.copy_out(pool.states[1], places)
    assert np.array_equal(np.frombuffer(arena, np.uint8), host[1])
    assert sums == [expected_sum(host[1, :1024]), expected_sum(host[1, 1024:])]
    assert pool.blocks[0].mover.copy_in(pool.states[2], places) == sums
    assert np.array_equal(cupy.asnumpy(slots), host[[0, 1, 1]])


def test_slots_that_are_no_whole_blocks_are_refused() -> None:
    from openinfer_kernels.cuda import Device
    from openinfer_kernels.cuda.common.block_copies import DevicePool
    from openinfer_kernels.cuda.common.libraries import cupy

    blocks, slots = cupy.zeros((4, 1024), np.uint8), cupy.zeros((2, 1536), np.uint8)
    with pytest.raises(ArrayMismatchError, match="whole blocks of 1024"):
        DevicePool(blocks, Device.open(), slots=slots)
