"""Slots of adapters: what they take, and what is in them, also where the B's of all slots lie next to each other."""

import threading
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from openinfer_core.errors import ContractViolation
from openinfer_engine.lora.adapter_folder import LowRank
from openinfer_engine.lora.arena import AdapterArena, AdapterShare, arena_bytes, piece_of
from openinfer_engine.model import Shard
from openinfer_kernels.cpu import CpuOps
from openinfer_kernels.ops.lora import AddedBy, DeltaOperator
from openinfer_kernels.weights.adapter_columns import MOST_COLUMNS, adapter_columns, most_columns
from openinfer_kernels.weights.bfloat16 import rounded_bits

PREFIX = "model.layers.0.self_attn"
MATRICES: list[tuple[Any, Shard]] = [
    (SimpleNamespace(name=f"{PREFIX}.{name}_proj", shape=shape), shard)
    for name, shape, shard in (
        ("q", (128, 64), Shard.COLUMN_PARALLEL),
        ("v", (64, 64), Shard.COLUMN_PARALLEL),
        ("o", (64, 128), Shard.ROW_PARALLEL),
    )
]


class Fused:
    """Serves every product whose slots have few columns."""

    def columns(self, weight: Any, *, num_slots: int, rank: int, starts: Sequence[int]) -> int:
        del weight, starts
        columns = adapter_columns(num_slots, rank)
        return columns if columns <= MOST_COLUMNS else 0


class FusingOps(CpuOps):
    fused_adapters: Any = Fused()

    def host_weights(self, num_values: int) -> Any:
        return np.full(num_values, np.nan, np.float32)


class LowRankPair(NamedTuple):
    a: Any
    b: Any
    scale: float


def share_of(arena: AdapterArena, pairs: Mapping[str, LowRankPair]) -> AdapterShare:
    """In memory that had something else, as it has in an engine."""
    writer = arena.begin_share()
    is_bfloat16 = all(each.dtype == np.uint16 for pair in pairs.values() for each in (pair.a, pair.b))
    says = {name: LowRank(len(pair.a), pair.scale) for name, pair in pairs.items()}
    into = writer.begin(says, is_bfloat16=is_bfloat16)
    if into is not None:
        writer.lay_out()
        into[:] = np.concatenate([each.view(np.uint8).ravel() for pair in pairs.values() for each in (pair.a, pair.b)])
        return writer.share()
    for name, pair in pairs.items():
        writer.take(name, "B", pair.b)
        writer.take(name, "A", pair.a)
    return writer.share()


def loaded(ops: Any, *, num_slots: int, max_rank: int, size: int = 1, may_fuse: bool = True) -> AdapterArena:
    arena = AdapterArena(ops=ops, num_slots=num_slots, max_rank=max_rank, may_fuse=may_fuse)
    pieces = [piece_of(matrix, shard, rank=0, size=size) for matrix, shard in MATRICES]
    arena.add(np.zeros(1), pieces[:2])
    arena.add(np.zeros(2), pieces[2:])
    return arena


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(("num_slots", "max_rank"), [(1, 16), (4, 16), (3, 8), (2, 40), (9, 16), (1, 512)])
def test_slots_take_what_the_plan_says_at_most(num_slots: int, max_rank: int, size: int) -> None:
    given = {"num_slots": num_slots, "rank": max_rank, "size": size, "itemsize_bytes": 4}
    plain = loaded(CpuOps(), num_slots=num_slots, max_rank=max_rank, size=size)
    assert plain.num_bytes == arena_bytes(MATRICES, may_fuse=False, **given)
    fused = loaded(FusingOps(), num_slots=num_slots, max_rank=max_rank, size=size)
    assert fused.num_bytes == arena_bytes(MATRICES, may_fuse=True, **given)


@pytest.mark.parametrize(("size", "may_defer", "is_kept"), [(1, True, True), (1, False, False), (2, True, False)])
def test_what_a_product_is_handed_to_adds_adapters_on_one_rank_with_our_own_operators(
    size: int, may_defer: bool, is_kept: bool
) -> None:
    arena = AdapterArena(ops=FusingOps(), num_slots=2, max_rank=16, may_defer=may_defer)
    added_by = AddedBy(DeltaOperator.ADD_RMS_NORM)
    matrix, shard = MATRICES[2]
    weight = np.zeros(1)
    arena.add(weight, [piece_of(matrix, shard, rank=0, size=size)], added_by=added_by)
    found = arena.weights.find(weight)
    assert found is not None
    assert found.added_by == (added_by if is_kept else None)


def test_columns_are_whole_chunks_of_whole_slots() -> None:
    assert [adapter_columns(slots, rank) for slots, rank in ((1, 16), (4, 16), (5, 16), (3, 8), (2, 24))] == [
        64,
        64,
        128,
        64,
        192,
    ]
    assert most_columns(2, 24) == 48, "with so many, adapters are added after a product"


@pytest.mark.parametrize("may_fuse", [True, False])
def test_what_an_adapter_leaves_out_is_zero_also_where_another_one_was(may_fuse: bool) -> None:
    rng = np.random.default_rng(0)
    arena = loaded(FusingOps(), num_slots=3, max_rank=8, may_fuse=may_fuse)
    pairs = {
        f"layers.0.self_attn.{name}_proj": LowRankPair(
            a=rng.normal(size=(5, columns)).astype(np.float32),
            b=rng.normal(size=(rows, 5)).astype(np.float32),
            scale=2.0,
        )
        for name, rows, columns in (("q", 128, 64), ("v", 64, 64), ("o", 64, 128))
    }
    arena.place(1, share_of(arena, pairs))
    (qv, o) = arena.products
    v = pairs["layers.0.self_attn.v_proj"]
    np.testing.assert_allclose(qv.a[1, 1, :5], v.a)
    np.testing.assert_allclose(qv.b[1, 128:, :5], 2 * v.b)
    assert o.b[1, :, :5].any()
    assert not any(each.a[slot].any() or each.b[slot].any() for each in (qv, o) for slot in (0, 2))
    assert (qv.columns is not None) == may_fuse
    if qv.columns is not None:
        np.testing.assert_array_equal(qv.columns[:, 8:16], qv.b[1])
    arena.place(1, share_of(arena, {name: pair for name, pair in pairs.items() if "v_proj" in name}))
    np.testing.assert_allclose(qv.b[1, 128:, :5], 2 * v.b)
    assert not any(each.any() for each in (qv.a[1, 0], qv.b[1, :128], o.a[1], o.b[1]))


@pytest.mark.parametrize("may_fuse", [True, False])
def test_what_lies_in_a_slot_is_copied_back_and_placed_again(may_fuse: bool) -> None:
    rng = np.random.default_rng(0)
    arena = loaded(FusingOps(), num_slots=3, max_rank=8, may_fuse=may_fuse)
    pair = LowRankPair(
        a=rng.normal(size=(5, 64)).astype(np.float32), b=rng.normal(size=(64, 5)).astype(np.float32), scale=2.0
    )
    arena.place(2, share_of(arena, {"layers.0.self_attn.v_proj": pair}))
    kept, before = arena.share_in(2), [(each.a.copy(), each.b.copy()) for each in arena.products]
    for each in arena.products:
        each.a[:], each.b[:] = 0, 0
    arena.place(2, kept)
    for (a, b), each in zip(before, arena.products, strict=True):
        np.testing.assert_array_equal(each.a, a)
        np.testing.assert_array_equal(each.b, b)
    assert arena.products[0].a.any()


class HalfOps(FusingOps):
    """Slots of BF16, as their bits."""

    def zeros(self, shape: Any, dtype: Any = np.uint16) -> Any:
        return np.zeros(shape, dtype)

    def host_weights(self, num_values: int) -> Any:
        return np.full(num_values, 0x7FC0, np.uint16)

    def copy_weights(self, copies: Any, *, scales: Any = None) -> None:
        for (host, array), scale in zip(copies, scales, strict=True):
            array[...] = 0 if host is None else _bits(_values(host) * np.float32(scale))


def _bits(values: Any) -> Any:
    return rounded_bits(np.asarray(values, np.float32))


def _values(bits: Any) -> Any:
    return (bits.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("num_scales", [1, 40])
@pytest.mark.parametrize("dtype", [np.uint16, np.float32, np.float16])
@pytest.mark.parametrize(("rank", "size"), [(8, 1), (5, 1), (8, 2), (5, 2)])
def test_slots_of_bf16_have_a_as_it_is_and_b_times_its_scale_rounded_once(
    rank: int, size: int, dtype: type, num_scales: int
) -> None:
    """Also where the tensors of a file are what a slot has: BF16, of the slots' rank, on one rank."""
    rng = np.random.default_rng(0)
    matrices: list[Any] = [SimpleNamespace(name=f"model.layers.{i}.mlp.up_proj", shape=(24, 16)) for i in range(40)]
    arena = AdapterArena(ops=HalfOps(), num_slots=2, max_rank=8)
    for i, matrix in enumerate(matrices):
        arena.add(np.zeros(i + 1), [piece_of(matrix, Shard.COLUMN_PARALLEL, rank=size - 1, size=size)])

    def made(shape: tuple[int, int]) -> Any:
        values = rng.normal(size=shape).astype(np.float32)
        return _bits(values) if dtype is np.uint16 else values.astype(dtype)

    pairs = {
        f"layers.{i}.mlp.up_proj": LowRankPair(made((rank, 16)), made((24, rank)), 0.3 + i % num_scales)
        for i in range(40)
        if i != 7
    }
    arena.place(1, share_of(arena, pairs))
    for i, product in enumerate(arena.products):
        a, b = product.a[1, 0], product.b[1]
        if i == 7:
            assert not a.any()
            assert not b.any()
            continue
        pair = pairs[f"layers.{i}.mlp.up_proj"]
        wide = [_values(each) if dtype is np.uint16 else each.astype(np.float32) for each in (pair.a, pair.b)]
        np.testing.assert_array_equal(a[:rank], _bits(wide[0]))
        own = wide[1][24 * (size - 1) // size :]
        np.testing.assert_array_equal(b[:, :rank], _bits(own * np.float32(pair.scale)))
        assert not a[rank:].any()
        assert not b[:, rank:].any()
        assert not product.a[0].any()
    kept = arena.share_in(1)
    before = [(each.a.copy(), each.b.copy()) for each in arena.products]
    arena.place(1, kept)
    for each, (a, b) in zip(arena.products, before, strict=True):
        assert (each.a == a).all()
        assert (each.b == b).all(), "the scale is in it already"


def test_model_that_is_read_again_keeps_its_slots_and_lets_go_of_the_old_weights() -> None:
    arena = loaded(CpuOps(), num_slots=2, max_rank=8)
    before, products, weights = arena.weights, arena.products, [np.zeros(1), np.zeros(2)]
    pieces = [piece_of(matrix, shard, rank=0, size=1) for matrix, shard in MATRICES]
    with arena.loading_again():
        arena.add(weights[0], pieces[:2])
        arena.add(weights[1], pieces[2:])
    assert arena.products == products
    assert [arena.weights.find(each) for each in weights] == list(products)
    assert len(arena.weights) == len(before)
    arena.drop_weights()
    assert not len(arena.weights)


@pytest.mark.parametrize(
    "added", [[slice(0, 2)], [slice(0, 1)], [slice(2, 3), slice(0, 2)], [slice(0, 2), slice(2, 3)] * 2]
)
def test_model_of_other_products_is_no_model_that_is_read_again(added: list[slice]) -> None:
    arena = loaded(CpuOps(), num_slots=2, max_rank=8)
    pieces = [piece_of(matrix, shard, rank=0, size=1) for matrix, shard in MATRICES]

    def load_again() -> None:
        with arena.loading_again():
            for each in added:
                arena.add(np.zeros(1), pieces[each])

    with pytest.raises(ContractViolation, match="adapted product"):
        load_again()


class CountingOps(CpuOps):
    def __init__(self) -> None:
        super().__init__()
        self.taken: list[int] = []

    def host_weights(self, num_values: int) -> Any:
        self.taken.append(num_values)
        return super().host_weights(num_values)


def pairs_of(*names: str) -> Mapping[str, LowRankPair]:
    shapes = {matrix.name.removeprefix(f"{PREFIX}."): matrix.shape for matrix, _ in MATRICES}
    pairs: dict[str, LowRankPair] = {}
    for name in names:
        rows, columns = shapes[f"{name}_proj"]
        a, b = np.full((8, columns), 2.0), np.full((rows, 8), 3.0)
        pairs[f"layers.0.self_attn.{name}_proj"] = LowRankPair(a=a, b=b, scale=1.0)
    return pairs


def test_memory_that_was_taken_ahead_is_the_next_adapters_if_it_is_as_large() -> None:
    ops = CountingOps()
    arena = loaded(ops, num_slots=2, max_rank=8)
    arena.prepare()
    arena.prepare()
    (whole,) = ops.taken
    assert share_of(arena, pairs_of("o")).num_bytes == ops.taken[-1] * 4 < whole * 4
    first = share_of(arena, pairs_of("q", "v", "o"))
    assert ops.taken == [whole, ops.taken[1]], "it was there"
    second = share_of(arena, pairs_of("q", "v", "o"))
    assert ops.taken[2:] == [whole]
    pairs = [
        (one, other) for each in zip(first.pieces, second.pieces, strict=True) for one, other in zip(*each, strict=True)
    ]
    assert not any(np.shares_memory(one.a, other.a) for one, other in pairs if one and other)


class SlowOps(CountingOps):
    """Makes memory when it may."""

    def __init__(self) -> None:
        super().__init__()
        self.has_begun, self.may_end = threading.Event(), threading.Event()

    def host_weights(self, num_values: int) -> Any:
        self.has_begun.set()
        assert self.may_end.wait(30)
        return super().host_weights(num_values)


def test_memory_that_is_being_made_ahead_is_waited_for() -> None:
    """Pinned memory takes the longer the more of it is made at a time."""
    ops = SlowOps()
    arena = loaded(ops, num_slots=2, max_rank=8)
    preparing = threading.Thread(target=arena.prepare)
    reading = threading.Thread(target=lambda: share_of(arena, pairs_of("q", "v", "o")))
    preparing.start()
    assert ops.has_begun.wait(30)
    reading.start()
    reading.join(0.05)
    assert reading.is_alive()
    ops.may_end.set()
    for each in (preparing, reading):
        each.join(30)
        assert not each.is_alive()
    assert len(ops.taken) == 1
