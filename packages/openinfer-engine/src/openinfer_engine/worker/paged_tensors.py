"""`KvPool`: the KV cache of one rank, and the views of it that a model reads and writes."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from openinfer_core.errors import ContractViolation
from openinfer_engine.model import KvLayers
from openinfer_kernels import Array, Ops, PagedCache
from openinfer_kv_cache import GroupKind, KvGroupLayout, KvLayout, KvRegion


@dataclass(frozen=True, slots=True, kw_only=True)
class KvPool:
    """All blocks of one rank, made once: a step changes what is in them, not where they lie."""

    blocks: Array
    """`[num_blocks, *layout.block_shape()]` where a block is dense, else `[num_blocks, numbers of a block]`."""
    layers: KvLayers
    """What `Model.forward` is handed: empty where blocks are not dense."""
    tensors: Mapping[str, Array] = field(default_factory=dict[str, Array])
    """What `AttentionBatch.caches` is, of blocks that are not dense: `GROUP.TENSOR` -> its view
    `[num_blocks, layers, num_heads, rows, head_dim]`."""


def make_pool(layout: KvLayout, *, num_blocks: int, ops: Ops) -> KvPool:
    """The KV cache of one rank, in the compute dtype.

    Raises:
        ContractViolation: the tensors of one block have different dtypes, or layers of several block tables have
            different shapes.
    """
    if layout.is_dense:
        blocks = ops.zeros((num_blocks, *layout.block_shape()))
        layers: dict[str, tuple[PagedCache, ...]] = {}
        for piece in _paged(layout):
            layers[piece.name] = layers.get(piece.name, ()) + tuple(_layers(blocks, piece))
        return KvPool(blocks=blocks, layers=layers)
    if layout.num_tables > 1:
        names = ", ".join(dict.fromkeys(piece.name for piece in _paged(layout)))
        raise ContractViolation(
            f"the paged groups {names} have layers of several shapes, and those of several block tables must have one: "
            "give their tensors one shape, or leave window_tokens out"
        )
    dtypes = {region.dtype for region in paged_regions(layout)}
    if len(dtypes) != 1:
        raise ContractViolation(f"tensors of one block must have one dtype, not {', '.join(sorted(dtypes))}")
    blocks = ops.zeros((num_blocks, layout.block_bytes // dtypes.pop().itemsize_bytes))
    tensors = {
        f"{group.name}.{region.name}": _view(blocks, group, region)
        for group in _paged(layout)
        for region in group.regions
    }
    return KvPool(blocks=blocks, layers={}, tensors=tensors)


def paged_regions(layout: KvLayout) -> list[KvRegion]:
    """The regions of a block, of all paged groups."""
    return [region for group in _paged(layout) for region in group.regions]


def _paged(layout: KvLayout) -> list[KvGroupLayout]:
    return [group for group in layout.groups if group.kind is GroupKind.PAGED]


def _layers(blocks: Array, piece: KvGroupLayout) -> Iterator[PagedCache]:
    """The layers of a piece, in order; several pieces may lie in a block of one table, one after the other."""
    first = piece.regions[0].base_bytes // piece.regions[0].stride_bytes
    for layer in range(piece.num_layers):
        is_first_layer = piece.first_layer + layer == 0
        yield PagedCache(data=blocks, layer=first + layer, table=piece.table, is_first_layer=is_first_layer)


def _view(pool: Array, group: KvGroupLayout, region: KvRegion) -> Array:
    if len(group.regions) != 1:
        raise ContractViolation(f"paged group {group.name} has several tensors beside other groups; give each its own")
    begin, numbers = region.base_bytes, group.num_layers * region.size_bytes
    numbers //= region.dtype.itemsize_bytes
    begin //= region.dtype.itemsize_bytes
    return pool[:, begin : begin + numbers].reshape(len(pool), group.num_layers, *region.shape)
