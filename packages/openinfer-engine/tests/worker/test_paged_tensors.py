"""Pools whose blocks hold several kinds of rows."""

import numpy as np
import pytest

from openinfer_core.errors import ContractViolation
from openinfer_engine.worker.paged_tensors import make_pool, paged_tensors
from openinfer_kernels.cpu import CpuOps
from openinfer_kv_cache import KvDtype, KvLayout, KvSpec, PagedGroup, PagedTensor


def group(name: str, *, layers: int, dim: int, ratio: int, dtype: KvDtype = KvDtype.FLOAT32) -> PagedGroup:
    tensor = PagedTensor(name="kv", num_heads=1, head_dim=dim, dtype=dtype, tokens_per_row=ratio)
    return PagedGroup(name=name, num_layers=layers, tensors=(tensor,))


def layout(*groups: PagedGroup) -> KvLayout:
    return KvLayout.from_spec(KvSpec(model_tag="a", paged=groups), block_size_tokens=16)


def test_views_cover_every_number_of_a_block_once() -> None:
    made = layout(group("fine", layers=3, dim=5, ratio=4), group("coarse", layers=2, dim=7, ratio=128))
    pool = make_pool(made, num_blocks=6, ops=CpuOps())
    views = paged_tensors(made, pool)
    assert {name: view.shape for name, view in views.items()} == {
        "fine.kv": (6, 3, 1, 4, 5),
        "coarse.kv": (6, 2, 1, 1, 7),
    }
    for view in views.values():
        view[...] = view + 1
    assert np.array_equal(pool, np.ones((6, made.block_bytes // 4), np.float32))


def test_dense_block_is_one_array_and_has_no_views() -> None:
    made = layout(group("attention", layers=3, dim=5, ratio=1))
    pool = make_pool(made, num_blocks=2, ops=CpuOps())
    assert pool.shape == (2, 3, 1, 1, 16, 5)
    assert paged_tensors(made, pool) == {}


def test_blocks_of_several_dtypes_are_refused() -> None:
    made = layout(group("a", layers=1, dim=2, ratio=4), group("b", layers=1, dim=2, ratio=4, dtype=KvDtype.BFLOAT16))
    with pytest.raises(ContractViolation, match="one dtype, not bfloat16, float32"):
        make_pool(made, num_blocks=1, ops=CpuOps())
