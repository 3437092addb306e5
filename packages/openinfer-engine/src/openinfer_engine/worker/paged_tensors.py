"""`KvPool`: the KV cache of one rank, and the views of it that a model reads and writes."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from openinfer_core.errors import ContractViolation
from openinfer_engine.model import KvLayers
from openinfer_kernels import Array, CacheFormat, Ops, PagedCache
from openinfer_kv_cache import FP8_KV_TAG, FP8_SCALE_BYTES, GroupKind, KvGroupLayout, KvLayout, KvRegion

_KEYS_AND_VALUES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class KvPool:
    """All blocks of one rank, made once: a step changes what is in them, not where they lie."""

    blocks: Array
    """`[num_blocks, *layout.block_shape()]` where a block is dense, in the compute dtype, else `[num_blocks, numbers of
    a block]`; in FP8 `[num_blocks, bytes of a block]`."""
    layers: KvLayers
    """What `Model.forward` is handed: empty where blocks are not dense."""
    tensors: Mapping[str, Array] = field(default_factory=dict[str, Array])
    """What `AttentionBatch.caches` is, of blocks that are not dense: `GROUP.TENSOR` -> its view
    `[num_blocks, layers, num_heads, rows, head_dim]`."""


def make_pool(layout: KvLayout, *, num_blocks: int, ops: Ops) -> KvPool:
    """The KV cache of one rank, in the compute dtype or in FP8, as the layout says.

    Raises:
        ContractViolation: the tensors of one block have different dtypes, or layers of several block tables have
            different shapes.
    """
    if is_fp8(layout):
        return _fp8_pool(layout, num_blocks=num_blocks, ops=ops)
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


def is_fp8(layout: KvLayout) -> bool:
    """Whether blocks hold keys and values in FP8, as `openinfer_kv_cache.attention_group` lays them out.

    Raises:
        ContractViolation: some groups do and others do not, or a block is not one of keys and values of one shape.
    """
    tags = {group.quantization_tag for group in _paged(layout)}
    if FP8_KV_TAG not in tags:
        return False
    if len(tags) > 1 or not layout.is_dense or layout.block_shape()[1] != _KEYS_AND_VALUES:
        raise ContractViolation(
            f"blocks that hold {', '.join(sorted(tags))} are not possible: all of their groups have keys and values in "
            "FP8, or none"
        )
    return True


def _fp8_pool(layout: KvLayout, *, num_blocks: int, ops: Ops) -> KvPool:
    num_layers, _, num_heads, block_tokens, width = layout.block_shape()
    head_dim, shape = width - FP8_SCALE_BYTES, (num_blocks, num_layers, _KEYS_AND_VALUES, num_heads)
    if block_tokens * head_dim % FP8_SCALE_BYTES:
        raise ContractViolation(
            f"blocks of {block_tokens} tokens with heads of {head_dim} bytes leave scales at no multiple of "
            f"{FP8_SCALE_BYTES} bytes"
        )
    blocks = ops.zeros((num_blocks, layout.block_bytes), np.uint8)
    # Of each head first the codes of its tokens, then their scales.
    heads: Any = blocks.reshape(*shape, block_tokens * width)
    codes = heads[..., : block_tokens * head_dim].reshape(*shape, block_tokens, head_dim)
    numbers: Any = blocks.view(np.float32).reshape(*shape, -1)
    scales = numbers[..., block_tokens * head_dim // FP8_SCALE_BYTES :]
    layers: dict[str, tuple[PagedCache, ...]] = {}
    for piece in _paged(layout):
        plain = tuple(_layers(codes, piece))
        in_fp8 = tuple(replace(each, format=CacheFormat.FP8, scales=scales) for each in plain)
        layers[piece.name] = layers.get(piece.name, ()) + in_fp8
    return KvPool(blocks=blocks, layers=layers)


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
