"""The caller's memory: arrays as blocks, and copies that leave the interpreter to other threads."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from openinfer_kv_cache import DeviceBlock, GroupKind, KvDtype, KvLayout, KvTierError
from openinfer_kv_cache.tiers.traits import BlockMemory, Medium
from openinfer_kv_offload.transfer.dlpack import dlpack_bytes

_BYTES = {"uint8", "int8"}

WrapMedium = Callable[[Medium], Medium]
"""Puts something between a tier and its medium: fault injection."""


def as_it_is(medium: Medium) -> Medium:
    return medium


def block_views(pool: Any, layout: KvLayout) -> list[memoryview]:
    """Views of a pool's blocks, without a copy, as `KvTier` takes them.

    Args:
        pool: C-contiguous `[num_blocks, ...]` in this machine's memory: anything with the buffer protocol (NumPy,
            `bytearray`, `mmap`) or with DLPack (torch on the CPU). Its elements are bytes, or of the layout's dtype, or
            integers as large as these, which hold their bits.
        layout: whose `block_bytes` each block has.

    Returns:
        `num_blocks` views of `block_bytes` bytes, writable if the pool is. They keep the pool alive.

    Raises:
        KvTierError: it is not contiguous, no whole number of blocks, or of another dtype.
    """
    whole, shape, dtype = _as_bytes(pool)
    if len(whole) == 0 or len(whole) % layout.block_bytes:
        raise KvTierError(f"the pool has {len(whole)} bytes: no whole number of blocks of {layout.block_bytes}")
    if len(shape) > 1 and len(whole) != shape[0] * layout.block_bytes:
        raise KvTierError(
            f"the pool of shape {list(shape)} and dtype {dtype} has {shape[0]} entries of {len(whole) // shape[0]} "
            f"bytes; a block of this layout has {layout.block_bytes}: make it [num_blocks, ...] of {_names(layout)}"
        )
    _check_dtype(dtype, layout)
    memory = whole.data
    return [memory[start : start + layout.block_bytes] for start in range(0, len(memory), layout.block_bytes)]


def check_blocks(blocks: Sequence[BlockMemory], layout: KvLayout, *, num_blocks: int, writable: bool) -> None:
    """Checks memory before a transfer takes it; of a device's blocks only their size is known.

    Raises:
        KvTierError: the number, the size, the contiguity or the right to write is not what the transfer needs, or some
            blocks are in this machine's memory and some are not.
    """
    if len(blocks) != num_blocks:
        raise KvTierError(f"{num_blocks} digests and {len(blocks)} blocks; they belong together one by one")
    num_on_device = 0
    for index, block in enumerate(blocks):
        if not isinstance(block, memoryview):
            num_on_device += 1
            if block.nbytes != layout.block_bytes:
                raise KvTierError(f"blocks[{index}] has {block.nbytes} bytes; this layout's have {layout.block_bytes}")
        elif block.nbytes != layout.block_bytes or block.format != "B" or not block.c_contiguous:
            raise KvTierError(
                f"blocks[{index}] has {block.nbytes} bytes of format {block.format!r}; a block of this layout is "
                f"{layout.block_bytes} contiguous ones of format 'B' (block_views makes them)"
            )
        elif writable and block.readonly:
            raise KvTierError(f"blocks[{index}] is read-only; a load writes into it")
    if num_on_device not in (0, len(blocks)):
        raise KvTierError("some blocks are in this machine's memory and some are a device's; move each kind by itself")


def in_memory(blocks: Sequence[BlockMemory]) -> list[memoryview]:
    """The blocks in this machine's memory: after `check_blocks` all of them, or none."""
    return [block for block in blocks if isinstance(block, memoryview)]


def on_a_device(blocks: Sequence[BlockMemory]) -> list[DeviceBlock]:
    return [block for block in blocks if not isinstance(block, memoryview)]


def copy_from_block(block: BlockMemory, into: memoryview) -> None:
    if isinstance(block, memoryview):
        copy_bytes(into, block)
    else:
        block.mover.copy_out([block], [into])


def copy_to_block(block: BlockMemory, content: memoryview) -> None:
    if isinstance(block, memoryview):
        copy_bytes(block, content)
    else:
        block.mover.copy_in([block], [content])


def copy_to_blocks(blocks: Sequence[BlockMemory], content: Sequence[memoryview]) -> None:
    """Blocks that are all in this machine's memory, or all of one device."""
    on_device = on_a_device(blocks)
    if on_device:
        on_device[0].mover.copy_in(on_device, content)
        return
    for block, each in zip(in_memory(blocks), content, strict=True):
        copy_bytes(block, each)


def copy_bytes(target: memoryview, source: memoryview) -> None:
    # Assigning to a memoryview would hold the interpreter's lock while it copies; NumPy lets it go.
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def _as_bytes(pool: Any) -> "tuple[np.ndarray[Any, Any], tuple[int, ...], str]":
    """The same memory as uint8 `[bytes]`, its shape, and the name of its dtype."""
    array: np.ndarray[Any, Any]
    if isinstance(pool, np.ndarray):  # taken as it is: some dtypes have no buffer format
        array = cast("np.ndarray[Any, Any]", pool)
    else:
        try:
            array = np.asarray(memoryview(pool))
        except TypeError:
            if not hasattr(pool, "__dlpack__"):
                raise KvTierError(
                    f"a pool of type {type(pool).__name__} has neither the buffer protocol nor DLPack"
                ) from None
            return dlpack_bytes(pool)
    if not array.flags.c_contiguous:
        raise KvTierError(f"the pool of shape {array.shape} is not C-contiguous; blocks are moved as a whole")
    return array.reshape(-1).view(np.uint8), array.shape, array.dtype.name


def _check_dtype(dtype: str, layout: KvLayout) -> None:
    wanted = _dtypes(layout)
    # Bytes hold anything, and a layout of bytes says nothing about what they mean.
    if dtype in _BYTES or wanted == {KvDtype.UINT8}:
        return
    sizes = {8 * each.itemsize_bytes for each in wanted}
    carriers = {f"{sign}int{bits}" for sign in ("", "u") for bits in sizes}
    # NumPy's name of E4M3 says that it has no infinities ("fn").
    if len(sizes) == 1 and dtype.removesuffix("fn") in {*wanted, *carriers}:
        return
    raise KvTierError(
        f"the pool has elements of {dtype}; this layout's are {_names(layout)}: give it in that dtype, or as "
        "bytes (uint8)"
    )


def _dtypes(layout: KvLayout) -> set[KvDtype]:
    groups = (group for group in layout.groups if group.kind is GroupKind.PAGED)
    return {region.dtype for group in groups for region in group.regions}


def _names(layout: KvLayout) -> str:
    return ", ".join(sorted(_dtypes(layout)))
