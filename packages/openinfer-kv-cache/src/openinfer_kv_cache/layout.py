"""`KvLayout`: where every byte of a block and of a state slot is, as data with a digest.

Page-first: a block holds all groups and all layers of its tokens in one contiguous range, so that it moves with
one copy. Groups follow each other; inside a group layers follow each other; inside a layer its tensors do, each as
`[num_heads, block_size_tokens, head_dim]` (`tokens_per_row` makes them fewer rows), so that one head's rows of one
tensor are contiguous:

    block of Qwen3   [layers, 2 (k, v), kv_heads, block_size_tokens, head_dim]
    region "k"       base 0,  stride 2 * size,  size kv_heads * block_size_tokens * head_dim * itemsize
    region "v"       base size, the same stride and size
    layer l of k     bytes base + l * stride .. + size

A state slot is laid out the same way from its groups. Padding appears only where a larger element follows a smaller
one.

Where layers of a group see only a window of tokens (`PagedGroup.window_tokens`), a sequence gives back the blocks that
no later token of these layers sees. So that it can, its groups do not share blocks: each is cut into *pieces* of
neighbouring layers (`pieces.py`), and each piece has a block table of its own, those that see everything first. All
tables draw blocks of one size from one pool; a block holds one piece of its tokens, from its byte 0:

    table 0   [layers of piece 0, 2, kv_heads, block_size_tokens, head_dim]       no window
    table 1   [layers of piece 1, …]                                              the first layers with a window
    table 2   [layers of piece 2, …]                                              the next ones

The digest covers every field. Code that moves KV between two owners compares digests first (`check_same_layout`):
with equal digests the bytes mean the same, otherwise nothing may be exchanged.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from functools import cached_property
from typing import cast

import msgspec

from openinfer_core.windows import MAX_TABLES, blocks_for_context
from openinfer_kv_cache.checks import MAX_LAYERS, check_count, check_distinct, check_name, check_tag
from openinfer_kv_cache.errors import KvConfigError, LayoutMismatchError
from openinfer_kv_cache.pieces import LayerGroup, choose_block_bytes
from openinfer_kv_cache.spec import KvDtype, KvSpec, PagedGroup, PagedTensor, StateSlotGroup, StateTensor, check_ranks

LAYOUT_VERSION = 1
_DIGEST_PERSON = b"openinfer-layout"


class GroupKind(StrEnum):
    """What a group's regions are offsets into."""

    PAGED = "paged"
    """A block."""
    SLOT = "slot"
    """A state slot."""


class KvRegion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One tensor of all layers of a group: layer `l` is at `base_bytes + l * stride_bytes`.

    Raises:
        KvConfigError: the fields contradict each other.
    """

    name: str
    dtype: KvDtype
    shape: tuple[int, ...]
    """One layer's part, row-major; a paged one is `[num_heads, rows, head_dim]`, one row per `tokens_per_row`."""
    base_bytes: int
    stride_bytes: int
    size_bytes: int
    tokens_per_row: int = 1
    """For a paged region. The row that ends at a block's token `t` is row `t // tokens_per_row` of that block."""

    def __post_init__(self) -> None:
        check_name("a region's name", self.name)
        where = f"of region {self.name!r}"
        if not self.shape or min(self.shape) < 1:
            raise KvConfigError(f"shape {where} is {self.shape}; every dimension must be at least 1")
        size_bytes = math.prod(self.shape) * self.dtype.itemsize_bytes
        if self.size_bytes != size_bytes:
            raise KvConfigError(f"size_bytes {where} is {self.size_bytes}; {self.shape} {self.dtype} is {size_bytes}")
        if self.base_bytes < 0 or self.base_bytes % self.dtype.itemsize_bytes:
            raise KvConfigError(f"base_bytes {where} is {self.base_bytes}; it must be a multiple of its element")
        if self.stride_bytes < size_bytes or self.stride_bytes % self.dtype.itemsize_bytes:
            raise KvConfigError(
                f"stride_bytes {where} is {self.stride_bytes}; "
                f"it must be at least {size_bytes} and a multiple of its element"
            )


class KvGroupLayout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One group of a spec, laid out, or one piece of it: neighbouring layers with a block table of their own."""

    name: str
    kind: GroupKind
    num_layers: int
    rope_tag: str
    quantization_tag: str
    regions: tuple[KvRegion, ...]
    table: int = 0
    """Of a paged group: the block table whose blocks hold it."""
    first_layer: int = 0
    """Which of the group's layers comes first here."""
    window_tokens: int | None = None
    """How many tokens a token sees, its own among them; None: all. One for all that is in a table."""

    def __post_init__(self) -> None:
        check_name("a group's name", self.name)
        where = f"of group {self.name!r}"
        check_count(f"num_layers {where}", self.num_layers, most=MAX_LAYERS)
        check_tag(f"rope_tag {where}", self.rope_tag)
        check_tag(f"quantization_tag {where}", self.quantization_tag)
        if not self.regions:
            raise KvConfigError(f"group {self.name!r} has no regions; it needs at least one")
        check_distinct(f"group {self.name!r}", (region.name for region in self.regions))

    def region(self, name: str) -> KvRegion:
        for region in self.regions:
            if region.name == name:
                return region
        names = ", ".join(region.name for region in self.regions)
        raise KvConfigError(f"group {self.name!r} has no region {name!r}; it has {names}")


class KvLayout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """The bytes of one rank's blocks and state slots. Build it with `from_spec`; decode it with msgspec.

    Raises:
        KvConfigError: the fields contradict each other: regions overlap, or reach beyond the block.
    """

    model_tag: str
    block_size_tokens: int
    block_bytes: int
    slot_bytes: int
    """0 without slot groups."""
    num_ranks: int
    rank_index: int
    groups: tuple[KvGroupLayout, ...]
    version: int = LAYOUT_VERSION

    def __post_init__(self) -> None:
        if self.version != LAYOUT_VERSION:
            raise KvConfigError(f"the layout has version {self.version}; this release reads {LAYOUT_VERSION}")
        check_tag("model_tag", self.model_tag)
        check_count("block_size_tokens", self.block_size_tokens)
        check_ranks(self.num_ranks, self.rank_index)
        _check_pieces(self.groups)
        _check_tables(list(self._of_kind(GroupKind.PAGED)))
        _check_extent("a slot", self.slot_bytes, self._of_kind(GroupKind.SLOT))
        for table in range(max(self.num_tables, 1)):
            _check_extent("a block", self.block_bytes, self._of_table(table))
        if self.block_bytes < 1:
            raise KvConfigError("the layout has no paged group; it needs at least one")
        for group in self._of_kind(GroupKind.PAGED):
            _check_paged_shapes(group, self.block_size_tokens)

    @classmethod
    def from_spec(cls, spec: KvSpec, *, block_size_tokens: int = 16) -> "KvLayout":
        """Lays out a spec's groups in their order, in one table; with windows each piece has one of its own.

        `spec.without_windows()` gives one table in any case.
        """
        check_count("block_size_tokens", block_size_tokens)
        has_windows = any(group.window_tokens is not None for group in spec.paged)
        paged, block_bytes = (_lay_out_pieces if has_windows else _lay_out)(spec.paged, block_size_tokens)
        slots, slot_bytes = _lay_out(spec.slots, block_size_tokens)
        return cls(
            model_tag=spec.model_tag,
            block_size_tokens=block_size_tokens,
            block_bytes=block_bytes,
            slot_bytes=slot_bytes,
            num_ranks=spec.num_ranks,
            rank_index=spec.rank_index,
            groups=(*paged, *slots),
        )

    @cached_property
    def digest(self) -> str:
        """128 bits in hexadecimal over the canonical encoding (JSON, keys sorted, no white space) of all fields."""
        encoded = msgspec.json.encode(self, order="sorted")
        return hashlib.blake2b(encoded, digest_size=16, person=_DIGEST_PERSON).hexdigest()

    def group(self, name: str) -> KvGroupLayout:
        """The group of that name; `KvConfigError` if there is none, or it is cut into several `pieces`."""
        first, *others = self.pieces(name)
        if others:
            raise KvConfigError(f"group {name!r} is cut into {1 + len(others)} pieces; ask for its pieces")
        return first

    def pieces(self, name: str) -> Sequence[KvGroupLayout]:
        """The pieces of a group, first layers first; one that is not cut is its only piece."""
        found = [group for group in self.groups if group.name == name]
        if not found:
            names = dict.fromkeys(group.name for group in self.groups)
            raise KvConfigError(f"no group {name!r}; there are {', '.join(names)}")
        return found

    def place_of(self, name: str, layer: int) -> tuple[int, int]:
        """Where a layer of a paged group is: its table, and which layer of its piece it is there."""
        for piece in self.pieces(name):
            if piece.kind is GroupKind.PAGED and 0 <= layer - piece.first_layer < piece.num_layers:
                return piece.table, layer - piece.first_layer
        raise KvConfigError(f"group {name!r} has no layer {layer} in blocks")

    @property
    def num_tables(self) -> int:
        """Block tables of one sequence."""
        return len(self.table_windows)

    @cached_property
    def table_windows(self) -> tuple[int | None, ...]:
        """How many tokens the layers of each block table see; None: all."""
        windows = {group.table: group.window_tokens for group in self._of_kind(GroupKind.PAGED)}
        return tuple(windows[table] for table in sorted(windows))

    def blocks_for_context(self, num_tokens: int) -> int:
        """Blocks that a sequence of so many tokens holds at most, in all its tables."""
        return blocks_for_context(num_tokens, self.table_windows, self.block_size_tokens)

    @property
    def is_dense(self) -> bool:
        """Whether a block is one dense array, which has a `block_shape`; otherwise it is addressed by region.

        It is where all layers of all groups have one shape. Groups of one table lie one after the other; with several
        tables the last layers of some blocks stay unused.
        """
        groups = list(self._of_kind(GroupKind.PAGED))
        kinds = {(region.shape, region.dtype, region.tokens_per_row) for group in groups for region in group.regions}
        return (
            len(kinds) == 1
            and len({len(group.regions) for group in groups}) == 1
            and groups[0].regions[0].tokens_per_row == 1
        )

    def block_shape(self) -> tuple[int, ...]:
        """`[layers, tensors, num_heads, block_size_tokens, head_dim]`; `KvConfigError` if a block is not dense.

        `layers` are those of all groups together; with several tables, those of the piece that has most.
        """
        groups = list(self._of_kind(GroupKind.PAGED))
        if not self.is_dense:
            names = ", ".join(f"{group.name}.{region.name}" for group in groups for region in group.regions)
            raise KvConfigError(f"a block is not one dense array: it holds {names}; address it by region")
        num_layers = self.block_bytes // groups[0].regions[0].stride_bytes
        return (num_layers, len(groups[0].regions), *groups[0].regions[0].shape)

    def pool_bytes(self, *, num_blocks: int, num_state_slots: int = 0) -> int:
        return num_blocks * self.block_bytes + num_state_slots * self.slot_bytes

    def num_blocks_for(self, budget_bytes: int, *, num_state_slots: int = 0) -> int:
        """Blocks that fit into a budget together with `num_state_slots` slots; `KvConfigError` if none does."""
        num_blocks = (budget_bytes - num_state_slots * self.slot_bytes) // self.block_bytes
        if num_blocks < 1:
            need = self.pool_bytes(num_blocks=1, num_state_slots=num_state_slots)
            raise KvConfigError(
                f"{budget_bytes} bytes hold no block: one block of {self.block_bytes} bytes and "
                f"{num_state_slots} slots of {self.slot_bytes} need {need}; give more memory, or ask for fewer slots"
            )
        return num_blocks

    def _of_kind(self, kind: GroupKind) -> Iterator[KvGroupLayout]:
        return (group for group in self.groups if group.kind is kind)

    def _of_table(self, table: int) -> Iterator[KvGroupLayout]:
        return (group for group in self._of_kind(GroupKind.PAGED) if group.table == table)


def check_same_layout(ours: KvLayout, theirs: KvLayout) -> None:
    """Checks that KV bytes may pass between two owners; raises `LayoutMismatchError` with the fields that differ."""
    if ours.digest == theirs.digest:
        return
    differences = _differences(msgspec.to_builtins(ours), msgspec.to_builtins(theirs))
    shown = "; ".join(differences[:5]) + ("; …" if len(differences) > 5 else "")
    raise LayoutMismatchError(f"KV layout {theirs.digest} is not ours, {ours.digest}: {shown}")


def _lay_out(groups: Iterable[PagedGroup | StateSlotGroup], block_size_tokens: int) -> tuple[list[KvGroupLayout], int]:
    """The groups one after the other, and the bytes of all, a multiple of the largest element."""
    laid_out: list[KvGroupLayout] = []
    end_bytes = 0
    align_bytes = 1
    for group in groups:
        group_align = max(tensor.dtype.itemsize_bytes for tensor in group.tensors)
        align_bytes = max(align_bytes, group_align)
        regions, end_bytes = _lay_out_group(group, _round_up(end_bytes, group_align), block_size_tokens)
        laid_out.append(
            KvGroupLayout(
                name=group.name,
                kind=GroupKind.PAGED if isinstance(group, PagedGroup) else GroupKind.SLOT,
                num_layers=group.num_layers,
                rope_tag=group.rope_tag,
                quantization_tag=group.quantization_tag,
                regions=regions,
            )
        )
    return laid_out, _round_up(end_bytes, align_bytes)


def _lay_out_group(
    group: PagedGroup | StateSlotGroup, base_bytes: int, block_size_tokens: int
) -> tuple[tuple[KvRegion, ...], int]:
    shapes = [_part_shape(tensor, block_size_tokens) for tensor in group.tensors]
    offsets: list[int] = []
    layer_bytes = 0
    for tensor, shape in zip(group.tensors, shapes, strict=True):
        offsets.append(_round_up(layer_bytes, tensor.dtype.itemsize_bytes))
        layer_bytes = offsets[-1] + math.prod(shape) * tensor.dtype.itemsize_bytes
    # So that every layer's tensors are aligned as those of the first are.
    stride_bytes = _round_up(layer_bytes, max(tensor.dtype.itemsize_bytes for tensor in group.tensors))
    regions = tuple(
        KvRegion(
            name=tensor.name,
            dtype=tensor.dtype,
            shape=shape,
            base_bytes=base_bytes + offset,
            stride_bytes=stride_bytes,
            size_bytes=math.prod(shape) * tensor.dtype.itemsize_bytes,
            tokens_per_row=tensor.tokens_per_row if isinstance(tensor, PagedTensor) else 1,
        )
        for tensor, shape, offset in zip(group.tensors, shapes, offsets, strict=True)
    )
    return regions, base_bytes + group.num_layers * stride_bytes


def _lay_out_pieces(groups: Sequence[PagedGroup], block_size_tokens: int) -> tuple[list[KvGroupLayout], int]:
    """Each group in pieces with a table each, those without a window first; and the bytes of a block."""
    ordered = sorted(groups, key=lambda group: group.window_tokens is not None)
    whole = [_lay_out([group], block_size_tokens)[0][0] for group in ordered]
    sizes = [LayerGroup(group.num_layers, group.regions[0].stride_bytes) for group in whole]
    align_bytes = max(tensor.dtype.itemsize_bytes for group in groups for tensor in group.tensors)
    block_bytes = choose_block_bytes(sizes, align_bytes=align_bytes)
    pieces: list[KvGroupLayout] = []
    for group, laid_out, size in zip(ordered, whole, sizes, strict=True):
        most_layers = block_bytes // size.layer_bytes
        for first_layer in range(0, group.num_layers, most_layers):
            piece = msgspec.structs.replace(
                laid_out,
                num_layers=min(most_layers, group.num_layers - first_layer),
                table=len(pieces),
                first_layer=first_layer,
                window_tokens=group.window_tokens,
            )
            pieces.append(piece)
    return pieces, block_bytes


def _part_shape(tensor: PagedTensor | StateTensor, block_size_tokens: int) -> tuple[int, ...]:
    if isinstance(tensor, StateTensor):
        return tensor.shape
    return (tensor.num_heads, _rows(block_size_tokens, tensor.tokens_per_row), tensor.head_dim)


def _rows(block_size_tokens: int, tokens_per_row: int) -> int:
    # The most that can end inside one block, wherever the first of them began.
    return -(-block_size_tokens // tokens_per_row)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _check_extent(what: str, extent_bytes: int, groups: Iterable[KvGroupLayout]) -> None:
    parts = sorted(
        (
            region.base_bytes + layer * region.stride_bytes,
            region.size_bytes,
            f"{group.name}.{region.name}[{group.first_layer + layer}]",
        )
        for group in groups
        for region in group.regions
        for layer in range(group.num_layers)
    )
    end_bytes = 0
    previous = "the start"
    for start_bytes, size_bytes, name in parts:
        if start_bytes < end_bytes:
            raise KvConfigError(f"{name} begins at byte {start_bytes} of {what}, inside {previous}")
        end_bytes, previous = start_bytes + size_bytes, name
    if end_bytes > extent_bytes or (not parts and extent_bytes):
        raise KvConfigError(f"{what} has {extent_bytes} bytes and its last part, {previous}, ends at {end_bytes}")


def _check_pieces(groups: Iterable[KvGroupLayout]) -> None:
    """Pieces of one group share its name, and follow each other without a gap."""
    ends: dict[str, int] = {}
    for group in groups:
        _check_piece(group)
        end = ends.get(group.name, 0)
        if end and not group.first_layer:
            raise KvConfigError(f"the layout names {group.name!r} twice")
        if group.first_layer != end:
            raise KvConfigError(f"a piece of group {group.name!r} begins at layer {group.first_layer}, not at {end}")
        ends[group.name] = end + group.num_layers


def _check_tables(groups: Iterable[KvGroupLayout]) -> None:
    windows: dict[int, int | None] = {}
    for group in groups:
        if windows.setdefault(group.table, group.window_tokens) != group.window_tokens:
            raise KvConfigError(f"group {group.name!r} has another window than the rest of table {group.table}")
    if sorted(windows) != list(range(len(windows))):
        raise KvConfigError(f"the layout has block tables {sorted(windows)}; they must be 0, 1, … without a gap")


def _check_piece(group: KvGroupLayout) -> None:
    where = f"of group {group.name!r}"
    check_count(f"table {where}", group.table, least=0, most=MAX_TABLES - 1)
    check_count(f"first_layer {where}", group.first_layer, least=0, most=MAX_LAYERS)
    if group.window_tokens is not None:
        check_count(f"window_tokens {where}", group.window_tokens)
    if group.kind is GroupKind.SLOT and (group.table, group.first_layer, group.window_tokens) != (0, 0, None):
        raise KvConfigError(f"group {group.name!r} is kept in state slots; these have no block table and no window")


def _check_paged_shapes(group: KvGroupLayout, block_size_tokens: int) -> None:
    for region in group.regions:
        check_count(f"tokens_per_row of region {group.name}.{region.name}", region.tokens_per_row)
        rows = _rows(block_size_tokens, region.tokens_per_row)
        if len(region.shape) != 3 or region.shape[1] != rows:
            raise KvConfigError(
                f"shape of {group.name}.{region.name} is {region.shape}; "
                f"a paged region is [num_heads, {rows}, head_dim]"
            )


def _differences(ours: object, theirs: object) -> list[str]:
    our_leaves, their_leaves = dict(_leaves("", ours)), dict(_leaves("", theirs))
    paths = sorted({*our_leaves, *their_leaves})
    return [
        f"{path} is {their_leaves.get(path, 'absent')!r}, ours {our_leaves.get(path, 'absent')!r}"
        for path in paths
        if our_leaves.get(path) != their_leaves.get(path)
    ]


def _leaves(path: str, tree: object) -> Iterator[tuple[str, object]]:
    # As `groups[0].regions[1].dtype` and its value.
    if isinstance(tree, dict):
        for key, value in cast("dict[str, object]", tree).items():
            yield from _leaves(f"{path}.{key}".lstrip("."), value)
    elif isinstance(tree, list | tuple):
        for index, value in enumerate(cast("Sequence[object]", tree)):
            yield from _leaves(f"{path}[{index}]", value)
    else:
        yield path, tree
