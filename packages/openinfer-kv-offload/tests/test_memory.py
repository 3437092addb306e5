import mmap

import ml_dtypes
import numpy as np
import pytest

from openinfer_kv_cache import KvTierError
from openinfer_kv_cache.testing.tier_cases import kit_layout
from openinfer_kv_offload import block_views

LAYOUT = kit_layout(head_dim=24)


class OnlyDlpack:
    """As torch's tensors are: no buffer protocol."""

    def __init__(self, array):
        self._array = array

    def __dlpack__(self, **options):
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


def buffers():
    return {
        "numpy": np.zeros((2, 3, 2), np.float32),
        "bytearray": bytearray(48),
        "mmap": mmap.mmap(-1, 48),
        "dlpack": OnlyDlpack(np.zeros((2, 12), np.int16)),
    }


@pytest.mark.parametrize("kind", ["numpy", "bytearray", "mmap", "dlpack"])
def test_views_share_the_memory_of_anything(kind):
    pool = buffers()[kind]
    views = block_views(pool, LAYOUT)
    assert {len(view) for view in views} == {24}
    views[1][0] = 7
    assert block_views(pool, LAYOUT)[1][0] == 7
    assert block_views(pool, LAYOUT)[0][0] == 0


def test_arrays_of_dtypes_that_have_no_buffer_format_work():
    assert len(block_views(np.zeros((2, 12), ml_dtypes.bfloat16), LAYOUT)) == 2


def test_memory_that_is_no_blocks_is_refused():
    with pytest.raises(KvTierError, match="not C-contiguous"):
        block_views(np.zeros((24, 4), np.uint8).T, LAYOUT)
    with pytest.raises(KvTierError, match="no whole number of blocks of 24"):
        block_views(bytearray(25), LAYOUT)
    with pytest.raises(KvTierError, match="neither the buffer protocol nor DLPack"):
        block_views([0] * 24, LAYOUT)


def test_memory_that_numpy_cannot_view_is_refused_with_the_reason():
    class OnAnotherDevice(OnlyDlpack):
        def __dlpack__(self, **options):
            raise BufferError("it is on a GPU")

    with pytest.raises(KvTierError, match="it is on a GPU; it must be in this machine's memory"):
        block_views(OnAnotherDevice(np.zeros(24, np.uint8)), LAYOUT)


def test_views_of_read_only_memory_are_read_only():
    assert block_views(bytes(24), LAYOUT)[0].readonly
