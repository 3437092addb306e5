"""Pools whose blocks hold several kinds of rows."""

import numpy as np
import pytest

from openinfer_core.errors import ContractViolation
from openinfer_engine.worker.paged_tensors import make_pool
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
    assert not pool.layers
    views = pool.tensors
    assert {name: view.shape for name, view in views.items()} == {
        "fine.kv": (6, 3, 1, 4, 5),
        "coarse.kv": (6, 2, 1, 1, 7),
    }
    for view in views.values():
        view[...] = view + 1
    assert np.array_equal(pool.blocks, np.ones((6, made.block_bytes // 4), np.float32))


def test_dense_block_is_one_array_and_has_no_views() -> None:
    made = layout(group("attention", layers=3, dim=5, ratio=1))
    pool = make_pool(made, num_blocks=2, ops=CpuOps())
    assert pool.blocks.shape == (2, 3, 1, 1, 16, 5)
    assert pool.tensors == {}
    (caches,) = pool.layers.values()
    assert [cache.layer for cache in caches] == [0, 1, 2]
    assert all(cache.data is pool.blocks for cache in caches)
    assert [cache.is_first_layer for cache in caches] == [True, False, False]


def dense(name: str, *, layers: int, window: int | None = None) -> PagedGroup:
    tensors = tuple(PagedTensor(name=each, num_heads=2, head_dim=8, dtype=KvDtype.FLOAT32) for each in "kv")
    return PagedGroup(name=name, num_layers=layers, tensors=tensors, window_tokens=window)


def test_layers_of_two_groups_of_one_table_lie_one_after_the_other() -> None:
    made = layout(dense("full", layers=2), dense("local", layers=3))
    pool = make_pool(made, num_blocks=4, ops=CpuOps())
    assert pool.blocks.shape == (4, 5, 2, 2, 16, 8)
    places = {name: [(cache.table, cache.layer) for cache in caches] for name, caches in pool.layers.items()}
    assert places == {"full": [(0, 0), (0, 1)], "local": [(0, 2), (0, 3), (0, 4)]}
    assert [cache.is_first_layer for cache in pool.layers["local"]] == [True, False, False]


def test_layers_of_every_table_begin_at_the_front_of_its_blocks() -> None:
    made = layout(dense("full", layers=5), dense("local", layers=22, window=100))
    pool = make_pool(made, num_blocks=4, ops=CpuOps())
    assert made.num_tables > 2
    assert pool.blocks.nbytes == 4 * made.block_bytes
    for name, caches in pool.layers.items():
        assert [(cache.table, cache.layer) for cache in caches] == [
            made.place_of(name, layer) for layer in range(len(caches))
        ]
        assert [layer for layer, cache in enumerate(caches) if cache.is_first_layer] == [0]


def test_blocks_of_several_dtypes_are_refused() -> None:
    made = layout(group("a", layers=1, dim=2, ratio=4), group("b", layers=1, dim=2, ratio=4, dtype=KvDtype.BFLOAT16))
    with pytest.raises(ContractViolation, match="one dtype, not bfloat16, float32"):
        make_pool(made, num_blocks=1, ops=CpuOps())


def test_layers_of_several_tables_and_shapes_are_refused() -> None:
    made = layout(
        dense("full", layers=5), group("local", layers=22, dim=8, ratio=1), dense("near", layers=9, window=64)
    )
    assert made.num_tables > 1
    with pytest.raises(ContractViolation, match="full, local, near have layers of several shapes"):
        make_pool(made, num_blocks=1, ops=CpuOps())
