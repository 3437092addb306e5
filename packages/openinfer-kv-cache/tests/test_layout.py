import hashlib
import json

import msgspec
import pytest

from openinfer_kv_cache import (
    GroupKind,
    KvConfigError,
    KvDtype,
    KvLayout,
    KvRegion,
    KvSpec,
    LayoutMismatchError,
    PagedGroup,
    PagedTensor,
    StateSlotGroup,
    StateTensor,
    check_same_layout,
)


def qwen3(dtype=KvDtype.BFLOAT16, **fields):
    k, v = (PagedTensor(name=name, num_heads=8, head_dim=128, dtype=dtype) for name in "kv")
    group = PagedGroup(name="attention", num_layers=36, tensors=(k, v), rope_tag="half:theta=1000000:dim=128")
    return KvSpec(**({"model_tag": "Qwen3-4B", "paged": (group,)} | fields))


def hybrid():
    """Everything that makes padding: a one-byte KV with scales, a second paged group, two slot tensors."""
    k = PagedTensor(name="k", num_heads=1, head_dim=3, dtype=KvDtype.FLOAT8_E4M3)
    scale = PagedTensor(name="k_scale", num_heads=1, head_dim=1, dtype=KvDtype.FLOAT32)
    draft = PagedTensor(name="k", num_heads=1, head_dim=3, dtype=KvDtype.BFLOAT16)
    conv = StateTensor(name="conv", shape=(3, 3), dtype=KvDtype.BFLOAT16)
    state = StateTensor(name="state", shape=(2, 2), dtype=KvDtype.FLOAT32)
    return KvSpec(
        model_tag="hybrid",
        paged=(
            PagedGroup(name="mtp", num_layers=1, tensors=(draft,)),
            PagedGroup(name="attention", num_layers=2, tensors=(k, scale), quantization_tag="fp8:per-token"),
        ),
        slots=(StateSlotGroup(name="delta", num_layers=2, tensors=(conv, state)),),
    )


def changed(layout, **fields):
    return msgspec.structs.replace(layout, **fields)


def with_window(group):
    return changed(group, window_tokens=7) if group.kind is GroupKind.PAGED else group


def with_region(layout, **fields):
    """The layout with its first region changed."""
    group = layout.groups[0]
    regions = (changed(group.regions[0], **fields), *group.regions[1:])
    return changed(layout, groups=(changed(group, regions=regions), *layout.groups[1:]))


def test_qwen3_block_is_layers_kv_heads_tokens_dim():
    layout = KvLayout.from_spec(qwen3())
    assert layout.block_shape() == (36, 2, 8, 16, 128)
    assert layout.block_bytes == 16 * 147_456
    assert layout.slot_bytes == 0
    k, v = layout.group("attention").regions
    piece = 8 * 16 * 128 * 2
    assert (k.base_bytes, k.stride_bytes, k.size_bytes) == (0, 2 * piece, piece)
    assert (v.base_bytes, v.stride_bytes, v.size_bytes) == (piece, 2 * piece, piece)


def test_regions_address_the_same_bytes_as_the_dense_array():
    """Element [layer, tensor, head, token, dim] of the block is where its region says."""
    k, v = (PagedTensor(name=name, num_heads=3, head_dim=5, dtype=KvDtype.FLOAT16) for name in "kv")
    spec = KvSpec(model_tag="m", paged=(PagedGroup(name="a", num_layers=4, tensors=(k, v)),))
    layout = KvLayout.from_spec(spec, block_size_tokens=7)
    shape = layout.block_shape()
    assert shape == (4, 2, 3, 7, 5)
    for tensor, region in enumerate(layout.group("a").regions):
        for layer in range(4):
            dense_index = (layer * 2 + tensor) * 3 * 7 * 5
            assert region.base_bytes + layer * region.stride_bytes == dense_index * 2
    assert layout.block_bytes == 4 * 2 * 3 * 7 * 5 * 2


def test_mixed_elements_are_aligned_and_in_order():
    layout = KvLayout.from_spec(hybrid(), block_size_tokens=3)
    assert [(group.name, group.kind) for group in layout.groups] == [
        ("mtp", GroupKind.PAGED),
        ("attention", GroupKind.PAGED),
        ("delta", GroupKind.SLOT),
    ]
    draft = layout.group("mtp").region("k")
    assert (draft.base_bytes, draft.size_bytes) == (0, 18)
    k, scale = layout.group("attention").regions
    assert (k.base_bytes, k.size_bytes, k.stride_bytes) == (20, 9, 24)
    assert (scale.base_bytes, scale.size_bytes, scale.stride_bytes) == (32, 12, 24)
    assert layout.block_bytes == 20 + 2 * 24
    conv, state = layout.group("delta").regions
    assert (conv.base_bytes, conv.size_bytes, conv.stride_bytes) == (0, 18, 36)
    assert (state.base_bytes, state.size_bytes, state.stride_bytes) == (20, 16, 36)
    assert layout.slot_bytes == 72


def test_digest_golden_value():
    """It is stamped on what tiers store: if this changes, so must LAYOUT_VERSION."""
    assert KvLayout.from_spec(qwen3()).digest == QWEN3_GOLDEN
    assert KvLayout.from_spec(hybrid(), block_size_tokens=3).digest == HYBRID_GOLDEN


def test_digest_is_that_of_canonical_json():
    """The encoding is what any JSON library writes with sorted keys and no white space."""
    layout = KvLayout.from_spec(hybrid())
    text = json.dumps(msgspec.to_builtins(layout), sort_keys=True, separators=(",", ":"))
    expected = hashlib.blake2b(text.encode(), digest_size=16, person=b"openinfer-layout")
    assert layout.digest == expected.hexdigest()


def test_digest_survives_encoding():
    layout = KvLayout.from_spec(hybrid())
    for module in (msgspec.json, msgspec.msgpack):
        decoded = module.decode(module.encode(layout), type=KvLayout)
        assert decoded == layout
        assert decoded.digest == layout.digest


def test_digest_covers_every_field():
    layout = KvLayout.from_spec(hybrid())
    group = layout.groups[0]
    others = [
        changed(layout, model_tag="other"),
        changed(layout, block_bytes=layout.block_bytes + 4),
        changed(layout, slot_bytes=layout.slot_bytes + 4),
        changed(layout, num_ranks=2),
        changed(layout, num_ranks=2, rank_index=1),
        KvLayout.from_spec(hybrid(), block_size_tokens=8),
        changed(layout, groups=(changed(group, name="x"), *layout.groups[1:])),
        changed(layout, groups=(changed(group, rope_tag="x"), *layout.groups[1:])),
        changed(layout, groups=(changed(group, quantization_tag="x"), *layout.groups[1:])),
        changed(layout, groups=(changed(group, table=1), *layout.groups[1:])),
        changed(layout, groups=tuple(with_window(each) for each in layout.groups)),
        changed(layout, groups=(layout.groups[1], group, layout.groups[2])),
        with_region(layout, name="x"),
        with_region(layout, dtype=KvDtype.FLOAT16),
        with_region(layout, shape=(3, 16, 1)),
        with_region(layout, stride_bytes=layout.groups[0].regions[0].stride_bytes + 2),
    ]
    digests = [layout.digest, *(other.digest for other in others)]
    assert len(set(digests)) == len(digests)
    assert all(len(bytes.fromhex(digest)) == 16 for digest in digests)


def test_check_same_layout_names_what_differs():
    ours = KvLayout.from_spec(qwen3())
    check_same_layout(ours, KvLayout.from_spec(qwen3()))
    theirs = KvLayout.from_spec(qwen3(KvDtype.FLOAT16, num_ranks=2))
    with pytest.raises(LayoutMismatchError) as caught:
        check_same_layout(ours, theirs)
    message = str(caught.value)
    assert ours.digest in message
    assert theirs.digest in message
    assert "groups[0].regions[1].dtype is 'float16', ours 'bfloat16'" in message
    assert "num_ranks is 2, ours 1" in message


def test_check_same_layout_of_fewer_groups_names_what_is_absent():
    ours = KvLayout.from_spec(hybrid())
    theirs = changed(ours, groups=ours.groups[:2], slot_bytes=0)
    with pytest.raises(LayoutMismatchError, match=r"groups\[2\]\.kind is 'absent', ours 'slot'"):
        check_same_layout(ours, theirs)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda base: changed(base, version=2), "version 2; this release reads 1"),
        (lambda base: changed(base, model_tag=""), "model_tag"),
        (lambda base: changed(base, block_size_tokens=8), r"is \[num_heads, 8, head_dim\]"),
        (lambda base: changed(base, block_bytes=base.block_bytes - 2), r"ends at 2359296"),
        (lambda base: changed(base, slot_bytes=4), "a slot has 4 bytes"),
        (lambda base: changed(base, rank_index=1), "rank_index is 1"),
        (lambda base: changed(base, groups=()), "a block has 2359296 bytes"),
        (lambda base: changed(base, groups=(), block_bytes=0), "no paged group"),
        (lambda base: changed(base, groups=base.groups * 2), "names 'attention' twice"),
        (lambda base: with_region(base, base_bytes=2), r"attention\.v\[0\] begins at byte 32768"),
        (lambda base: with_region(base, stride_bytes=2**20), "ends at"),
        (lambda base: with_region(base, stride_bytes=32768), r"begins at byte"),
        (lambda base: with_region(base, name="v"), "names 'v' twice"),
        (lambda base: with_region(base, shape=(8, 128, 16)), r"is \[num_heads, 16, head_dim\]"),
    ],
)
def test_layout_that_contradicts_itself_is_refused(make, message):
    with pytest.raises(KvConfigError, match=message):
        make(KvLayout.from_spec(qwen3()))


def test_layout_whose_regions_share_one_byte_is_refused():
    a, b = (PagedTensor(name=name, num_heads=1, head_dim=3, dtype=KvDtype.UINT8) for name in "ab")
    spec = KvSpec(model_tag="m", paged=(PagedGroup(name="g", num_layers=1, tensors=(a, b)),))
    layout = KvLayout.from_spec(spec, block_size_tokens=1)
    group = layout.groups[0]
    regions = (group.regions[0], changed(group.regions[1], base_bytes=2))
    with pytest.raises(KvConfigError, match=r"g\.b\[0\] begins at byte 2 of a block, inside g\.a\[0\]"):
        changed(layout, groups=(changed(group, regions=regions),))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"shape": ()}, r"shape of region 'k' is \(\)"),
        ({"shape": (1, 0, 4)}, "every dimension"),
        ({"size_bytes": 31}, "size_bytes of region 'k' is 31; .* is 32"),
        ({"base_bytes": -2}, "base_bytes of region 'k' is -2"),
        ({"base_bytes": 1}, "base_bytes of region 'k' is 1"),
        ({"stride_bytes": 30}, "stride_bytes of region 'k' is 30"),
        ({"stride_bytes": 33}, "stride_bytes of region 'k' is 33"),
        ({"name": "1"}, "a region's name"),
    ],
)
def test_region_that_contradicts_itself_is_refused(fields, message):
    region = KvRegion(name="k", dtype=KvDtype.FLOAT16, shape=(2, 2, 4), base_bytes=0, stride_bytes=32, size_bytes=32)
    with pytest.raises(KvConfigError, match=message):
        changed(region, **fields)


def test_block_shape_of_a_block_that_is_not_dense_is_refused():
    layout = KvLayout.from_spec(hybrid())
    assert not layout.is_dense
    with pytest.raises(KvConfigError, match=r"holds mtp.k, attention.k, attention.k_scale; address it by region"):
        layout.block_shape()


def compressed(*, tokens_per_row, block_size_tokens):
    tensor = PagedTensor(name="kv", num_heads=1, head_dim=3, dtype=KvDtype.BFLOAT16, tokens_per_row=tokens_per_row)
    spec = KvSpec(model_tag="a", paged=(PagedGroup(name="entries", num_layers=2, tensors=(tensor,)),))
    return KvLayout.from_spec(spec, block_size_tokens=block_size_tokens)


@pytest.mark.parametrize(("tokens_per_row", "rows"), [(1, 16), (4, 4), (5, 4), (16, 1), (128, 1)])
def test_block_has_room_for_the_rows_that_end_in_it_wherever_they_begin(tokens_per_row, rows):
    layout = compressed(tokens_per_row=tokens_per_row, block_size_tokens=16)
    (region,) = layout.group("entries").regions
    assert region.shape == (1, rows, 3)
    assert layout.is_dense == (tokens_per_row == 1)
    ends = range(tokens_per_row - 1, 16 * 40, tokens_per_row)
    places = [(end // 16, end % 16 // tokens_per_row) for end in ends]
    assert len(set(places)) == len(places)
    assert max(row for _, row in places) < rows


def test_rows_of_several_tokens_are_part_of_the_digest_where_the_shape_is_the_same():
    one, other = (compressed(tokens_per_row=ratio, block_size_tokens=16) for ratio in (16, 128))
    assert one.group("entries").regions[0].shape == other.group("entries").regions[0].shape
    assert one.digest != other.digest
    with pytest.raises(KvConfigError, match=r"a paged region is \[num_heads, 8, head_dim\]"):
        changed(one, block_size_tokens=128)


def test_group_and_region_unknown_name_lists_what_there_is():
    layout = KvLayout.from_spec(qwen3())
    with pytest.raises(KvConfigError, match="no group 'mtp'; there are attention"):
        layout.group("mtp")
    with pytest.raises(KvConfigError, match="no region 'q'; it has k, v"):
        layout.group("attention").region("q")


def test_from_spec_block_size_out_of_range_is_refused():
    with pytest.raises(KvConfigError, match="block_size_tokens is 0"):
        KvLayout.from_spec(qwen3(), block_size_tokens=0)


def test_num_blocks_for_a_budget_beside_slots():
    layout = KvLayout.from_spec(hybrid(), block_size_tokens=3)
    budget = 10 * layout.block_bytes + 3 * layout.slot_bytes
    assert layout.num_blocks_for(budget, num_state_slots=3) == 10
    assert layout.num_blocks_for(budget - 1, num_state_slots=3) == 9
    assert layout.pool_bytes(num_blocks=10, num_state_slots=3) == budget
    assert layout.num_blocks_for(layout.block_bytes) == 1


@pytest.mark.parametrize(("budget_bytes", "num_state_slots"), [(0, 0), (67, 0), (-5, 0), (68, 1), (139, 1)])
def test_num_blocks_for_too_small_a_budget_is_refused(budget_bytes, num_state_slots):
    layout = KvLayout.from_spec(hybrid(), block_size_tokens=3)
    with pytest.raises(KvConfigError, match=f"{budget_bytes} bytes hold no block"):
        layout.num_blocks_for(budget_bytes, num_state_slots=num_state_slots)


QWEN3_GOLDEN = "55e135690f04fd60393ed95ce7eb1615"
HYBRID_GOLDEN = "a6ed7a5e7f51a6dbb56abee55bcfb350"
