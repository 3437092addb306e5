"""`TableEvents`: what a router is told of a pool whose sequences have several block tables."""

from collections.abc import Sequence

import msgspec

from openinfer_engine.kv_events.recorder import PoolChange
from openinfer_engine.kv_events.schema import (
    MEDIUM,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvEvent,
    TableBlockRemoved,
    TableBlockStored,
    block_hash,
    stored_event,
)
from openinfer_kv_cache import Digest, StoredBlocks


class TableEvents:
    """Makes events of changes; remembers the table of each block that was told of.

    A pool names a block that it gives up by its digest, and the hash in a message is the same in all tables. One that
    was not told of, since it came to be found when another of its digest had gone, is no event: a router knows of none.
    """

    def __init__(self, table_windows: Sequence[int | None], *, block_size_tokens: int) -> None:
        self._windows = table_windows
        self._block_size_tokens = block_size_tokens
        self._tables: dict[Digest, int] = {}

    def events(self, change: PoolChange) -> Sequence[KvEvent]:
        if change is None:
            self._tables.clear()
            return [AllBlocksCleared()]
        return [self._stored(change)] if isinstance(change, StoredBlocks) else self._removed(change)

    def _stored(self, blocks: StoredBlocks) -> BlockStored:
        self._tables.update(dict.fromkeys(blocks.digests, blocks.table))
        window = self._windows[blocks.table]
        event = stored_event(blocks, block_size_tokens=self._block_size_tokens)
        return TableBlockStored(
            *msgspec.structs.astuple(event),
            group_idx=blocks.table,
            kv_cache_spec_kind="full_attention" if window is None else "sliding_window",
            kv_cache_spec_sliding_window=window,
        )

    def _removed(self, digests: Sequence[Digest]) -> Sequence[BlockRemoved]:
        by_table: dict[int, list[int]] = {}
        for digest in digests:
            table = self._tables.pop(digest, None)
            if table is not None:
                by_table.setdefault(table, []).append(block_hash(digest))
        return [TableBlockRemoved(hashes, MEDIUM, group_idx=table) for table, hashes in by_table.items()]
