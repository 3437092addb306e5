"""The messages of KV events, as routers read them: msgpack, each event an array that begins with its name.

    batch    [timestamp in s, [event, ...], data-parallel rank]
    event    ["BlockStored", [hash, ...], parent hash or nil, [token id, ...], block size, nil, medium, LoRA name,
              extra keys]
             ["BlockRemoved", [hash, ...], medium]
             ["AllBlocksCleared"]

A model of several block tables has the same hashes in each, and events say which table they are of:

    event    ["BlockStored", ..., extra keys, table, "full_attention" or "sliding_window", window in tokens or nil]
             ["BlockRemoved", [hash, ...], medium, table]

This is the schema of vLLM (`vllm/distributed/kv_events.py`; its fields, recorded from two releases, are a fixture of
the tests) in the form of arrays. vLLM's later releases write an event as a map of the same fields; routers that read
maps read arrays, too, and older ones read arrays only. Blocks in KV tiers have events of their own, whose medium is CPU
or STORAGE, without tokens. A hash is the low 64 bits of a block's digest. Extra keys are
one entry per block, nil or what its hash depends on besides tokens: the LoRA name, and in a prefix's first block the
salt.
"""

from collections.abc import Sequence

import msgspec

from openinfer_engine.kv_events.recorder import TierChange
from openinfer_kv_cache import Digest, StoredBlocks

# Of blocks in the engine's pool, also where that pool is a CPU's: routers know no other name for it.
MEDIUM = "GPU"


class BlockStored(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=True):
    """Prefixes that the engine has from now on."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None  # always nil; the name says which adapter
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None


class TableBlockStored(BlockStored, frozen=True, array_like=True, gc=False, tag="BlockStored", kw_only=True):
    """`BlockStored` of one table of several."""

    group_idx: int
    kv_cache_spec_kind: str
    kv_cache_spec_sliding_window: int | None


class BlockRemoved(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=True):
    """Prefixes that it has no longer."""

    block_hashes: list[int]
    medium: str | None


class TableBlockRemoved(BlockRemoved, frozen=True, array_like=True, gc=False, tag="BlockRemoved", kw_only=True):
    """`BlockRemoved` of one table of several."""

    group_idx: int


class AllBlocksCleared(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=True):
    """It has none."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KvEventBatch(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What changed in one step."""

    ts: float
    events: list[KvEvent]
    data_parallel_rank: int = 0


def block_hash(digest: Digest) -> int:
    return int.from_bytes(digest[-8:], "big")


def stored_event(blocks: StoredBlocks, *, block_size_tokens: int) -> BlockStored:
    first = tuple(key for key in (blocks.lora_name, blocks.cache_salt if blocks.parent is None else None) if key)
    others = (blocks.lora_name,) if blocks.lora_name else None
    extra_keys = [first or None, *[others] * (len(blocks.digests) - 1)]
    return BlockStored(
        block_hashes=[block_hash(digest) for digest in blocks.digests],
        parent_block_hash=None if blocks.parent is None else block_hash(blocks.parent),
        token_ids=blocks.token_ids.tolist(),
        block_size=block_size_tokens,
        lora_id=None,
        medium=MEDIUM,
        lora_name=blocks.lora_name,
        extra_keys=extra_keys if any(extra_keys) else None,
    )


def removed_event(digests: Sequence[Digest]) -> BlockRemoved:
    return BlockRemoved(block_hashes=[block_hash(digest) for digest in digests], medium=MEDIUM)


def tier_event(change: TierChange, *, block_size_tokens: int) -> KvEvent:
    """As vLLM tells of blocks outside the pool: their hashes, without the tokens, which the pool's event had."""
    hashes = [block_hash(digest) for digest in change.digests]
    if not change.is_stored:
        return BlockRemoved(block_hashes=hashes, medium=str(change.medium))
    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=None,
        token_ids=[],
        block_size=block_size_tokens,
        lora_id=None,
        medium=str(change.medium),
        lora_name=None,
    )
