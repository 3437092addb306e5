"""Layouts of specs whose layers differ in how far they look back."""

import msgspec
import pytest

from openinfer_kv_cache import (
    GroupKind,
    KvConfigError,
    KvDtype,
    KvLayout,
    KvSpec,
    PagedGroup,
    PagedTensor,
    StateSlotGroup,
    StateTensor,
)

replace = msgspec.structs.replace


def group(name, num_layers, window_tokens=None, *, num_heads=2, head_dim=8, dtype=KvDtype.BFLOAT16):
    tensors = tuple(PagedTensor(name=each, num_heads=num_heads, head_dim=head_dim, dtype=dtype) for each in "kv")
    return PagedGroup(name=name, num_layers=num_layers, tensors=tensors, window_tokens=window_tokens)


def spec(*groups, **fields):
    return KvSpec(model_tag="m", paged=groups, **fields)


def gemma(num_local, num_global, window_tokens=1024):
    """The local layers first, as they come first in the model."""
    return spec(group("local", num_local, window_tokens), group("full", num_global))


@pytest.mark.parametrize(
    ("num_local", "num_global", "tables", "layers"),
    [(13, 13, 2, 13), (40, 8, 6, 8), (52, 10, 5, 13), (29, 5, 7, 5), (22, 4, 7, 4), (18, 18, 2, 18)],
    ids=["Gemma-2 2B", "Gemma-3 12B", "Gemma-3 27B", "Gemma-3 4B", "Gemma-3 1B", "gpt-oss 120B"],
)
def test_pieces_of_published_models(num_local, num_global, tables, layers):
    layout = KvLayout.from_spec(gemma(num_local, num_global))
    assert layout.num_tables == tables
    assert layout.is_dense
    assert layout.block_shape() == (layers, 2, 2, 16, 8)
    assert layout.block_bytes == layers * 2 * 2 * 16 * 8 * 2
    assert layout.table_windows == (None, *[1024] * (tables - 1))
    assert KvLayout.from_spec(gemma(num_local, num_global).without_windows()).num_tables == 1


def test_every_layer_has_a_place_of_its_own():
    layout = KvLayout.from_spec(gemma(29, 5))
    places = [layout.place_of("full", layer) for layer in range(5)]
    assert places == [(0, layer) for layer in range(5)]
    places += [layout.place_of("local", layer) for layer in range(29)]
    assert places[5:8] == [(1, 0), (1, 1), (1, 2)]
    assert places[-1] == (6, 3)
    assert len(set(places)) == 34
    assert max(layer for _, layer in places) == 4
    for layer in (-1, 29):
        with pytest.raises(KvConfigError, match=f"group 'local' has no layer {layer}"):
            layout.place_of("local", layer)


def test_place_of_a_layer_that_is_kept_in_state_slots_is_refused():
    states = StateSlotGroup(name="s", num_layers=2, tensors=(StateTensor(name="s", shape=(2,), dtype=KvDtype.INT8),))
    layout = KvLayout.from_spec(spec(group("full", 2), slots=(states,)))
    assert layout.place_of("full", 1) == (0, 1)
    with pytest.raises(KvConfigError, match="group 's' has no layer 0 in blocks"):
        layout.place_of("s", 0)


def test_pieces_of_one_group_share_its_name_and_begin_at_byte_0():
    layout = KvLayout.from_spec(gemma(22, 4))
    pieces = layout.pieces("local")
    assert [(piece.table, piece.first_layer, piece.num_layers) for piece in pieces] == [
        (1, 0, 4),
        (2, 4, 4),
        (3, 8, 4),
        (4, 12, 4),
        (5, 16, 4),
        (6, 20, 2),
    ]
    assert {piece.regions[0].base_bytes for piece in pieces} == {0}
    assert layout.group("full") == layout.pieces("full")[0]
    with pytest.raises(KvConfigError, match="group 'local' is cut into 6 pieces"):
        layout.group("local")
    with pytest.raises(KvConfigError, match="no group 'x'; there are full, local"):
        layout.group("x")


def test_one_kind_of_layers_with_a_window_has_one_table():
    layout = KvLayout.from_spec(spec(group("local", 32, 4096)))
    assert layout.table_windows == (4096,)
    whole = KvLayout.from_spec(spec(group("local", 32)))
    assert whole.table_windows == (None,)
    assert layout.block_bytes == whole.block_bytes
    assert layout.digest != whole.digest


def test_layers_of_other_sizes_fill_blocks_as_far_as_they_go():
    layout = KvLayout.from_spec(spec(group("wide", 6, num_heads=3), group("narrow", 20, 64)))
    assert not layout.is_dense
    wide, narrow = (layout.pieces(name)[0].regions[0].stride_bytes for name in ("wide", "narrow"))
    for piece in layout.groups:
        layer_bytes = wide if piece.name == "wide" else narrow
        assert piece.num_layers * layer_bytes <= layout.block_bytes
    assert sum(piece.num_layers for piece in layout.pieces("narrow")) == 20
    with pytest.raises(KvConfigError, match="address it by region"):
        layout.block_shape()


def test_blocks_keep_the_alignment_of_the_largest_element():
    odd = group("odd", 5, 8, num_heads=1, head_dim=3, dtype=KvDtype.UINT8)
    layout = KvLayout.from_spec(spec(odd, group("full", 1, num_heads=1, head_dim=1, dtype=KvDtype.FLOAT32)))
    assert layout.block_bytes % 4 == 0


def test_more_kinds_of_layers_than_eight_have_a_table_each():
    layout = KvLayout.from_spec(spec(*(group(f"g{index}", 3, index + 1) for index in range(12))))
    assert layout.num_tables == 12


def test_context_holds_all_blocks_where_layers_see_all_and_a_window_where_they_do_not():
    layout = KvLayout.from_spec(gemma(40, 8))  # one table without a window, five of 1024 tokens, 16 tokens a block
    assert layout.blocks_for_context(0) == 0
    assert layout.blocks_for_context(16) == 6
    assert layout.blocks_for_context(17) == 12
    assert layout.blocks_for_context(100_000) == 6250 + 5 * (64 + 2)
    whole = KvLayout.from_spec(gemma(40, 8).without_windows())
    assert whole.blocks_for_context(100_000) == 6250


def test_windowed_layout_survives_encoding():
    layout = KvLayout.from_spec(gemma(29, 5))
    decoded = msgspec.json.decode(msgspec.json.encode(layout), type=KvLayout)
    assert decoded == layout
    assert decoded.digest == layout.digest
    assert decoded.digest != KvLayout.from_spec(gemma(29, 5, 512)).digest


def with_piece(layout, index, **fields):
    pieces = list(layout.groups)
    pieces[index] = replace(pieces[index], **fields)
    return replace(layout, groups=tuple(pieces))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda base: with_piece(base, 1, table=0), "another window than the rest of table 0"),
        (lambda base: with_piece(base, 6, table=5), r"local.k\[25\] begins at byte 0 of a block, inside"),
        (lambda base: with_piece(base, 2, table=7), r"block tables \[0, 1, 3, 4, 5, 6, 7\]"),
        (lambda base: with_piece(base, 2, table=-1), "table of group 'local' is -1"),
        (lambda base: with_piece(base, 2, table=256), "table of group 'local' is 256"),
        (lambda base: with_piece(base, 2, first_layer=6), "begins at layer 6, not at 5"),
        (lambda base: with_piece(base, 2, first_layer=0), "names 'local' twice"),
        (lambda base: with_piece(base, 0, first_layer=1), "begins at layer 1, not at 0"),
        (lambda base: with_piece(base, 2, window_tokens=0), "window_tokens of group 'local' is 0"),
        (lambda base: with_piece(base, 0, kind=GroupKind.SLOT, window_tokens=5), "no block table and no window"),
        (lambda base: with_piece(base, 6, num_layers=6), "ends at"),
    ],
)
def test_windowed_layout_that_contradicts_itself_is_refused(make, message):
    with pytest.raises(KvConfigError, match=message):
        make(KvLayout.from_spec(gemma(29, 5)))


def test_window_out_of_range_is_refused():
    with pytest.raises(KvConfigError, match="window_tokens of group 'local' is 0; it must be in 1 "):
        group("local", 2, 0)
