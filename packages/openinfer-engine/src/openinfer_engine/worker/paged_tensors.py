"""Blocks that are no dense array: several kinds of rows, each a view of one pool."""

from openinfer_core.errors import ContractViolation
from openinfer_kernels import Array, Ops
from openinfer_kv_cache import GroupKind, KvGroupLayout, KvLayout, KvRegion


def make_pool(layout: KvLayout, *, num_blocks: int, ops: Ops) -> Array:
    """The KV cache of one rank, in the compute dtype.

    Returns:
        `[num_blocks, *layout.block_shape()]` where a block is dense, else `[num_blocks, numbers of a block]`.

    Raises:
        ContractViolation: the tensors of one block have different dtypes.
    """
    if layout.is_dense:
        return ops.zeros((num_blocks, *layout.block_shape()))
    dtypes = {region.dtype for region in paged_regions(layout)}
    if len(dtypes) != 1:
        raise ContractViolation(f"tensors of one block must have one dtype, not {', '.join(sorted(dtypes))}")
    return ops.zeros((num_blocks, layout.block_bytes // dtypes.pop().itemsize_bytes))


def paged_tensors(layout: KvLayout, pool: Array) -> dict[str, Array]:
    """`GROUP.TENSOR` -> its view `[blocks, layers, num_heads, rows, head_dim]` of a pool; none of a dense one's."""
    if layout.is_dense:
        return {}
    return {
        f"{group.name}.{region.name}": _view(pool, group, region)
        for group in _paged(layout)
        for region in group.regions
    }


def paged_regions(layout: KvLayout) -> list[KvRegion]:
    """The regions of a block, of all paged groups."""
    return [region for group in _paged(layout) for region in group.regions]


def _paged(layout: KvLayout) -> list[KvGroupLayout]:
    return [group for group in layout.groups if group.kind is GroupKind.PAGED]


def _view(pool: Array, group: KvGroupLayout, region: KvRegion) -> Array:
    if len(group.regions) != 1:
        raise ContractViolation(f"paged group {group.name} has several tensors beside other groups; give each its own")
    begin, numbers = region.base_bytes, group.num_layers * region.size_bytes
    numbers //= region.dtype.itemsize_bytes
    begin //= region.dtype.itemsize_bytes
    return pool[:, begin : begin + numbers].reshape(len(pool), group.num_layers, *region.shape)
