"""`WindowedSequence`: a sequence whose layers differ in how far they look back, with a block table for each kind.

    table 0, no window   |  sealed  |  sealed  |  sealed  | writable | writable |      room for every known token
    table 1, a window    |   void   |   void   |  sealed  | writable |                 room for the next chunk
                                                               ▲ first token not computed yet

The tables have equal positions, and draw from one pool. Those with a window also change at their beginning: what no
later token sees is given back (`free_behind_windows`), and its entries are void until the sequence drops all. A prompt
that is longer than a window is computed in chunks, and needs room in these tables for one chunk at a time
(`reserve(windowed_tokens=)`).
"""

from collections.abc import Callable, Iterable, Sequence

from openinfer_kv_cache.block_table import BlockTable, tail_first
from openinfer_kv_cache.blocks import BlockPool
from openinfer_kv_cache.checks import require
from openinfer_kv_cache.digest import Digest, PrefixHasher, table_digests
from openinfer_kv_cache.errors import IntegrityError, SequenceStateError
from openinfer_kv_cache.listener import BlockListener
from openinfer_kv_cache.prefix_placement import Placement, placement_of
from openinfer_kv_cache.prefix_search import PrefixMatch, cut_to_tables
from openinfer_kv_cache.sequence import NO_BLOCKS, BlockSequence, require_not_negative
from openinfer_kv_cache.windows import most_seen_blocks


class WindowedSequence(BlockSequence):
    """A `BlockSequence` of several tables, or of one with a window; made by `KvCache.sequence`, too."""

    __slots__ = ("_capacity_blocks", "_free_at_tokens")

    def __init__(
        self,
        pool: BlockPool,
        hasher: PrefixHasher,
        root: Digest,
        token_ids: Iterable[int],
        *,
        table_windows: Sequence[int | None],
        on_release: Callable[[BlockSequence], None] | None = None,
        lora_name: str | None = None,
        cache_salt: str | None = None,
        owner: str = "",
    ) -> None:
        super().__init__(
            pool,
            hasher,
            root,
            token_ids,
            on_release=on_release,
            lora_name=lora_name,
            cache_salt=cache_salt,
            owner=owner,
        )
        self._tables = [BlockTable(index, window, []) for index, window in enumerate(table_windows)]
        self._blocks = self._tables[0].blocks
        self._capacity_blocks = 0  # the least over the tables
        self._free_at_tokens = 0  # fewer computed tokens leave no block behind a window
        self._set_room()

    # Questions.

    @property
    def capacity_tokens(self) -> int:
        return self._capacity_blocks * self._block_size

    def would_fit(self, num_tokens: int, *, spare_blocks: int = 0, windowed_tokens: int | None = None) -> bool:
        missing = sum(self._missing_blocks(num_tokens, windowed_tokens))
        room = self._pool.available_blocks - spare_blocks
        if self._holds_blocks():
            return not missing or missing <= room
        # A match takes what windows see, for which the first tokens alone may need no room.
        most_seen = sum(most_seen_blocks(table.window_tokens, self._block_size) for table in self._tables)
        if missing + most_seen <= room:
            return True
        prefix = self._find_tables_prefix()
        missing = sum(self._missing_blocks(num_tokens, windowed_tokens, matched_blocks=prefix.num_blocks))
        num_idle = sum(map(self._pool.is_idle, prefix.all_blocks()))
        return missing <= room - num_idle

    # Verbs.

    def match(self) -> int:
        self._require_live("match")
        if self._holds_blocks():
            raise SequenceStateError(f"cannot match: the sequence holds {len(self._blocks)} blocks; match comes first")
        self._pool.expire()
        found = self._find_tables_prefix()
        self._pool.acquire(found.all_blocks(), self._owner)
        missed_blocks = self._num_matchable_blocks() - found.num_blocks
        self._pool.count_match(hit_blocks=found.num_blocks, missed_blocks=missed_blocks)
        self._generation = self._pool.generation
        for table, held in zip(self._tables, found.held, strict=True):
            table.set(found.num_blocks - len(held), held)
        self._set_sealed(found.num_blocks)
        self._set_room()
        return found.num_blocks * self._block_size

    def reserve(self, num_tokens: int, *, windowed_tokens: int | None = None) -> Sequence[int] | None:
        if -(-num_tokens // self._block_size) <= self._capacity_blocks:
            return NO_BLOCKS
        self._require_live("reserve")
        missing = self._missing_blocks(num_tokens, windowed_tokens)
        added = self._pool.allocate(sum(missing), self._owner)
        if added is None:
            return None
        if not self._holds_blocks():
            self._generation = self._pool.generation
        begin = 0
        for table, count in zip(self._tables, missing, strict=True):
            table.blocks.extend(added[begin : begin + count])
            begin += count
        self._set_room()
        return added

    def seal(self, num_computed_tokens: int) -> Sequence[int]:
        sealed = super().seal(num_computed_tokens)
        for table in self._tables:
            if table.found and self._num_sealed > max(table.found):
                table.found.clear()
        return sealed

    def free_behind_windows(self, num_computed_tokens: int, *, unsealed: bool = False) -> bool:
        if num_computed_tokens < self._free_at_tokens:  # most steps leave no block behind
            return False
        if num_computed_tokens > self.capacity_tokens:
            raise SequenceStateError(
                f"cannot free behind {num_computed_tokens} computed tokens: there is room for {self.capacity_tokens}"
            )
        freed: list[int] = []
        for table in self._tables:
            end = table.first_needed(num_computed_tokens, self._block_size)
            freed += table.void(end if unsealed else min(end, self._num_sealed))
        freed.reverse()
        self._pool.release(freed)
        self._set_free_at()
        return bool(freed)

    def shrink(self, num_tokens: int) -> int:
        require_not_negative(num_tokens)
        keep = self._pool.blocks_for(num_tokens)
        if keep <= self._num_sealed:
            # A sealed block is never written again: the cut one goes back whole.
            keep = min(keep, num_tokens // self._block_size)
        kept_tokens = min(num_tokens, min(keep, self._capacity_blocks) * self._block_size)
        if any(table.num_void > table.first_needed(kept_tokens, self._block_size) for table in self._tables):
            keep = kept_tokens = 0
        dropped = list(tail_first(self._tables, keep))
        for table in self._tables:
            table.cut(keep)
        self._set_sealed(min(self._num_sealed, keep))
        self._set_room()
        self._pool.release(dropped)
        return kept_tokens

    # Loading.

    def lacking_blocks(self, table: BlockTable, num_blocks: int) -> Sequence[int]:
        """Entries of a table that a prefix of `num_blocks` blocks needs, and neither the sequence nor the pool has."""
        return self._place(table, num_blocks).lacking

    def place_prefix(self, num_blocks: int) -> bool:
        """Makes the tables those of a prefix of `num_blocks` blocks, of which the `lacking_blocks` are to be loaded.

        What the pool has of it is taken, what nothing sees after it becomes void, and there is room for the rest. When
        that is filled, `seal` closes it; `shrink(0)` drops all. Only for a sequence without a row since its `match`:
        entries are replaced.

        Returns:
            Whether there is room; else nothing has changed. There is none after a `clear`, for content of both weights.
        """
        self._require_live("load")
        if self._generation != self._pool.generation:
            return False
        places = [self._place(table, num_blocks) for table in self._tables]
        found = [block_id for place in places for block_id in place.found.values()]
        surplus = [block_id for place in places for block_id in place.surplus]
        num_new = sum(place.num_new for place in places)
        if num_new + sum(map(self._pool.is_idle, found)) > self._pool.available_blocks + len(surplus):
            return False
        self._pool.acquire(found, self._owner)  # before what is allocated evicts them
        self._pool.release([*surplus, *(block_id for place in places for block_id in reversed(place.passed))])
        new_blocks = self._pool.allocate(num_new, self._owner)
        require(new_blocks is not None, f"{num_new} blocks were there and could not be allocated")
        remaining = iter(new_blocks or ())
        for place in places:
            place.apply(remaining)
        self._set_room()
        return True

    def _place(self, table: BlockTable, num_blocks: int) -> Placement:
        digests = self.prefix_digests()
        return placement_of(self._pool, table, digests, num_sealed=self._num_sealed, num_blocks=num_blocks)

    # Integrity.

    def check_integrity(self) -> None:
        super().check_integrity()
        if self._capacity_blocks != min(len(table.blocks) for table in self._tables):
            raise IntegrityError(f"there is room for {self._capacity_blocks} blocks, and a table has another length")
        if self._num_sealed > self._capacity_blocks:
            raise IntegrityError(f"{self._num_sealed} of {self._capacity_blocks} blocks sealed")
        for table in self._tables:
            if any(table.blocks[: table.num_void]) or table.num_void > len(table.blocks):
                raise IntegrityError(f"table {table.index} counts {table.num_void} void entries of {table.blocks}")

    def estimate_cached_tokens(self) -> int:
        return self.count_cached_tokens()  # a prefix may lack what no later token sees

    # Private.

    def _num_cached_blocks(self) -> int:
        return self._find_tables_prefix().num_blocks

    def _seal_blocks(self, first: int, end: int, *, is_current: bool) -> Sequence[int]:
        sealed: list[int] = []
        for table in self._tables:
            for begin, stop in table.runs_to_seal(first, end):
                blocks = table.blocks[begin:stop]
                digests = table_digests(self._digests[begin:stop], table.index)
                self._pool.seal(blocks, digests if is_current else None)
                sealed += blocks
        return sealed

    def _tell_sealed(self, listener: BlockListener, first: int, end: int) -> None:
        for table in self._tables:
            for begin, stop in table.runs_to_seal(first, end):
                self._tell(listener, table, begin, stop)

    def _find_tables_prefix(self) -> PrefixMatch:
        """The longest prefix that every table can begin with."""
        whole = next((table for table in self._tables if table.window_tokens is None), None)
        if whole is not None:
            chain = self._find_prefix(whole.index)
            return cut_to_tables(self._pool, self._tables, self._digests, chain, len(chain))
        num_matchable = self._num_matchable_blocks()
        self._hash_blocks(num_matchable)
        return cut_to_tables(self._pool, self._tables, self._digests, (), num_matchable)

    def _missing_blocks(self, num_tokens: int, windowed_tokens: int | None, *, matched_blocks: int = 0) -> list[int]:
        """Of each table the blocks that it lacks for so many tokens, after a match of `matched_blocks`."""
        need = -(-num_tokens // self._block_size)
        windowed = need if windowed_tokens is None else min(need, -(-windowed_tokens // self._block_size))
        return [
            max((need if table.window_tokens is None else windowed) - max(len(table.blocks), matched_blocks), 0)
            for table in self._tables
        ]

    def _holds_blocks(self) -> bool:
        return any(table.blocks for table in self._tables)

    def _set_room(self) -> None:
        self._capacity_blocks = min(len(table.blocks) for table in self._tables)
        self._set_free_at()

    def _set_free_at(self) -> None:
        self._free_at_tokens = min(table.frees_at(self._block_size) for table in self._tables)
