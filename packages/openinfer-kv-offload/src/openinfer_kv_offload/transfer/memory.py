"""The caller's memory: arrays as blocks, and copies that leave the interpreter to other threads."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from openinfer_kv_cache import DeviceBlock, KvLayout, KvTierError
from openinfer_kv_cache.tier_traits import BlockMemory, Medium

WrapMedium = Callable[[Medium], Medium]
"""Puts something between a tier and its medium: fault injection."""


def as_it_is(medium: Medium) -> Medium:
    return medium


def block_views(pool: Any, layout: KvLayout) -> list[memoryview]:
    """Views of a pool's blocks, without a copy, as `KvTier` takes them.

    Args:
        pool: C-contiguous `[num_blocks, ...]` in this machine's memory: anything with the buffer protocol (NumPy,
            `bytearray`, `mmap`) or with DLPack (torch on the CPU). DLPack has no name for bfloat16 that NumPy reads:
            give `tensor.view(torch.uint8)`.
        layout: whose `block_bytes` each block has.

    Returns:
        `num_blocks` views of `block_bytes` bytes, writable if the pool is. They keep the pool alive.

    Raises:
        KvTierError: it is not contiguous, or no whole number of blocks.
    """
    array = _as_array(pool)
    if not array.flags.c_contiguous:
        raise KvTierError(f"the pool of shape {array.shape} is not C-contiguous; blocks are moved as a whole")
    if array.nbytes == 0 or array.nbytes % layout.block_bytes:
        raise KvTierError(f"the pool has {array.nbytes} bytes: no whole number of blocks of {layout.block_bytes}")
    whole = array.reshape(-1).view(np.uint8).data
    return [whole[start : start + layout.block_bytes] for start in range(0, len(whole), layout.block_bytes)]


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


def copy_bytes(target: memoryview, source: memoryview) -> None:
    # Assigning to a memoryview would hold the interpreter's lock while it copies; NumPy lets it go.
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def _as_array(pool: Any) -> "np.ndarray[Any, Any]":
    """The same memory as an array; NumPy's own are taken as they are, also of dtypes without a buffer format."""
    if isinstance(pool, np.ndarray):
        return cast("np.ndarray[Any, Any]", pool)
    try:
        return np.asarray(memoryview(pool))
    except TypeError:
        if not hasattr(pool, "__dlpack__"):
            raise KvTierError(
                f"a pool of type {type(pool).__name__} has neither the buffer protocol nor DLPack"
            ) from None
    try:
        return np.from_dlpack(pool)
    except (BufferError, RuntimeError) as error:
        raise KvTierError(
            f"a pool of type {type(pool).__name__} cannot be viewed by NumPy: {error}; it must be in this machine's "
            "memory and of a dtype that NumPy has (of bfloat16 give a view as bytes)"
        ) from error
