import gc
import mmap
import weakref
from array import array

import ml_dtypes
import numpy as np
import pytest

from openinfer_kv_cache import KvDtype, KvLayout, KvSpec, KvTierError, PagedGroup, PagedTensor
from openinfer_kv_cache.testing.tier_cases import kit_layout
from openinfer_kv_offload import block_views
from openinfer_kv_offload.transfer.dlpack import DlTensor, pointer_of

LAYOUT = kit_layout(head_dim=24)


def layout_of(dtype):
    """Blocks of 24 elements."""
    tensor = PagedTensor(name="k", num_heads=1, head_dim=24, dtype=dtype)
    spec = KvSpec(model_tag="typed", paged=(PagedGroup(name="attention", num_layers=1, tensors=(tensor,)),))
    return KvLayout.from_spec(spec, block_size_tokens=1)


class OnlyDlpack:
    """As torch's tensors are: no buffer protocol, and dtypes that NumPy cannot hand out itself.

    Args:
        array: whose memory it is. code: of DLPack's dtype, in the place of the array's; bfloat is 4.
    """

    def __init__(self, array, code=None, device=None):
        self._array, self._code, self._device = array, code, device

    def __dlpack__(self):
        capsule = self._array.__dlpack__()
        if self._code is not None:
            tensor = DlTensor.from_address(pointer_of(capsule))
            tensor.dtype_code = self._code
        return capsule

    def __dlpack_device__(self):
        return self._device or self._array.__dlpack_device__()


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


@pytest.mark.parametrize("code", [None, 4], ids=["int16", "bfloat16"])
def test_bfloat16_by_dlpack_is_the_same_memory_and_lives_as_long_as_its_views(code):
    pool = np.zeros((2, 24), np.int16)
    memory = weakref.ref(pool)
    views = block_views(OnlyDlpack(pool, code), layout_of(KvDtype.BFLOAT16))
    views[1][:2] = b"\x80\x3f"  # 1.0
    assert pool[1].view(ml_dtypes.bfloat16)[0] == 1
    del pool
    gc.collect()
    assert bytes(views[1][:2]) == b"\x80\x3f"
    assert memory() is not None
    del views
    gc.collect()
    assert memory() is None


@pytest.mark.parametrize(
    ("pool", "message"),
    [
        (
            np.zeros((2, 24), np.float32),
            r"2 entries of 96 bytes; a block of this layout has 48: make it .* of bfloat16",
        ),
        (np.zeros(48, np.float32), "elements of float32; this layout's are bfloat16"),
        (np.zeros((2, 24), np.float16), "elements of float16; this layout's are bfloat16"),
        (np.zeros((2, 48), bool), "elements of bool"),
        (OnlyDlpack(np.zeros((2, 24), np.float16)), "elements of float16; this layout's are bfloat16"),
        (array("d", [0] * 12), "elements of float64"),
    ],
    ids=["float32 blocks", "float32", "float16", "bool", "dlpack", "buffer"],
)
def test_a_pool_of_another_dtype_is_refused(pool, message):
    with pytest.raises(KvTierError, match=message):
        block_views(pool, layout_of(KvDtype.BFLOAT16))


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint16, ml_dtypes.bfloat16])
def test_a_pool_of_bytes_of_bits_or_of_the_layouts_dtype_is_taken(dtype):
    shape = (2, 48) if dtype is np.uint8 else (2, 24)
    assert len(block_views(np.zeros(shape, dtype), layout_of(KvDtype.BFLOAT16))) == 2


def test_fp8_is_known_by_numpys_name():
    assert len(block_views(np.zeros((2, 24), ml_dtypes.float8_e4m3fn), layout_of(KvDtype.FLOAT8_E4M3))) == 2
    with pytest.raises(KvTierError, match="elements of float8_e5m2"):
        block_views(np.zeros((2, 24), ml_dtypes.float8_e5m2), layout_of(KvDtype.FLOAT8_E4M3))


def test_memory_that_is_no_blocks_is_refused():
    with pytest.raises(KvTierError, match="not C-contiguous"):
        block_views(np.zeros((24, 4), np.uint8).T, LAYOUT)
    with pytest.raises(KvTierError, match="not C-contiguous"):
        block_views(OnlyDlpack(np.zeros((24, 4), np.uint8).T), LAYOUT)
    with pytest.raises(KvTierError, match="no whole number of blocks of 24"):
        block_views(bytearray(25), LAYOUT)
    with pytest.raises(KvTierError, match="neither the buffer protocol nor DLPack"):
        block_views([0] * 24, LAYOUT)


def test_memory_that_is_not_handed_out_is_refused_with_the_reason():
    class Refuses(OnlyDlpack):
        def __dlpack__(self):
            raise BufferError("it requires grad")

    with pytest.raises(KvTierError, match="type Refuses cannot be viewed: it requires grad"):
        block_views(Refuses(np.zeros(24, np.uint8)), LAYOUT)
    with pytest.raises(KvTierError, match="type OnlyDlpack is on a device; it must be in this machine's memory"):
        block_views(OnlyDlpack(np.zeros(24, np.uint8), device=(2, 0)), LAYOUT)


def test_views_of_read_only_memory_are_read_only():
    assert block_views(bytes(24), LAYOUT)[0].readonly
