"""`BlockSequence`: the tokens and the block table of one request.

    token ids   0 ........................................ num_tokens          known: prompt, then sampled ids
    blocks      |  sealed  |  sealed  | writable | writable |                  capacity_tokens
                           ▲ num_sealed_blocks * block_size_tokens

Ids and blocks grow independently: `reserve` makes room for a token before its id is known, `append` adds the
id when it is, `seal` closes the blocks whose ids are known and whose KV is computed. A block table only ever
changes at its end, and no call replaces a block that it has handed out. A model whose layers see windows of tokens
has sequences with several tables (`windowed_sequence.py`).

    empty ── match ──► holding ── release ──► released
      │                 ▲  │ ▲
      └──── reserve ────┘  │ └─ reserve, append, seal, shrink, truncate
      ▲                    │
      └──── shrink(0) ─────┘   (preemption: the ids stay, so that `match` can find what is still cached)
"""

from array import array
from collections.abc import Callable, Iterable, Sequence

from openinfer_kv_cache.block_table import BlockTable
from openinfer_kv_cache.blocks import BlockPool
from openinfer_kv_cache.digest import Digest, PrefixHasher, table_digests
from openinfer_kv_cache.errors import IntegrityError, SequenceStateError
from openinfer_kv_cache.listener import BlockListener, StoredBlocks

NO_BLOCKS: Sequence[int] = ()
_HASH_AHEAD_BLOCKS = 32  # so that a long prompt that is not cached costs little to look up


class BlockSequence:
    """Made by `KvCache.sequence`; used from the thread of its pool.

    `root` is the start of the digest chain, made of `lora_name` and `cache_salt`, which are kept for the pool's
    listener. `token_ids` (each a uint32) are copied; `on_release` is called once. The blocks are of the share of
    `owner`.
    """

    __slots__ = (
        "_block_size",
        "_blocks",
        "_cache_salt",
        "_digests",
        "_generation",
        "_hasher",
        "_lora_name",
        "_num_sealed",
        "_on_release",
        "_owner",
        "_pool",
        "_released",
        "_root",
        "_seal_at_tokens",
        "_tables",
        "_token_ids",
    )

    def __init__(
        self,
        pool: BlockPool,
        hasher: PrefixHasher,
        root: Digest,
        token_ids: Iterable[int],
        *,
        on_release: Callable[["BlockSequence"], None] | None = None,
        lora_name: str | None = None,
        cache_salt: str | None = None,
        owner: str = "",
    ) -> None:
        self._pool = pool
        self._owner = owner
        self._lora_name = lora_name
        self._cache_salt = cache_salt
        self._hasher = hasher
        self._root = root
        self._token_ids = array("I", token_ids)
        self._on_release = on_release
        self._block_size = pool.block_size_tokens
        self._blocks: list[int] = []
        self._tables: Sequence[BlockTable] = ()
        self._digests: list[Digest] = []
        self._num_sealed = 0
        self._seal_at_tokens = self._block_size
        self._generation = pool.generation
        self._released = False

    # Questions.

    @property
    def token_ids(self) -> "array[int]":
        """The known ids, as uint32 (`array("I")`, the buffer protocol works on it); not to be changed."""
        return self._token_ids

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    @property
    def blocks(self) -> Sequence[int]:
        """The first block table, position by position; a live view, not to be changed."""
        return self._blocks

    @property
    def tables(self) -> Sequence[BlockTable]:
        """All block tables; live views, not to be changed."""
        if not self._tables:
            self._tables = (BlockTable(0, None, self._blocks),)
        return self._tables

    @property
    def block_size_tokens(self) -> int:
        return self._block_size

    @property
    def owner(self) -> str:
        return self._owner

    @property
    def num_sealed_blocks(self) -> int:
        return self._num_sealed

    @property
    def capacity_tokens(self) -> int:
        """Tokens that have room in every table."""
        return len(self._blocks) * self._block_size

    @property
    def is_released(self) -> bool:
        return self._released

    def prefix_digests(self) -> Sequence[Digest]:
        """Digests of all full blocks of known ids: what a tier is asked for; not to be changed."""
        self._hash_blocks(len(self._token_ids) // self._block_size)
        return self._digests

    def matchable_digests(self) -> Sequence[Digest]:
        """Those of `prefix_digests` that `match` may find: at least one known token is left to compute."""
        return self.prefix_digests()[: self._num_matchable_blocks()]

    def count_cached_tokens(self) -> int:
        """What `match` would find now; changes nothing and counts nothing."""
        return self._num_cached_blocks() * self._block_size

    def estimate_cached_tokens(self) -> int:
        """About `count_cached_tokens`, from O(log blocks) look-ups: a block that is cached is taken for one whose
        predecessors are, too. Digests are computed a little beyond what is cached.
        """
        digests, num_matchable, find = self._digests, self._num_matchable_blocks(), self._pool.find
        cached, step = 0, 1
        while (end := min(cached + step, num_matchable)) > cached:
            self._hash_blocks(end)
            if find(digests[end - 1]) is None:
                break
            cached, step = end, 2 * step
        while end - cached > 1:  # the block before `cached` is cached, that before `end` is not
            middle = (cached + end) // 2
            cached, end = (middle, end) if find(digests[middle - 1]) is not None else (cached, middle)
        return cached * self._block_size

    def would_wait_for(self, other: "BlockSequence") -> bool:
        """Whether `other` holds the first block that `match` would not find now, and has it still to be sealed."""
        # Then to compute it here would be to compute it twice. One digest is compared first, so that it is O(1) for
        # prompts that have nothing in common.
        num_matchable, theirs = self._num_matchable_blocks(), other.prefix_digests()
        self._hash_blocks(min(num_matchable, 1))
        if not num_matchable or not theirs or self._digests[0] != theirs[0]:
            return False
        place = self._num_cached_blocks()
        if place == num_matchable or not other.num_sealed_blocks <= place < min(len(other.blocks), len(theirs)):
            return False
        return self._digests[place] == theirs[place]

    def would_fit(self, num_tokens: int, *, spare_blocks: int = 0, windowed_tokens: int | None = None) -> bool:
        """Whether the sequence can get room for `num_tokens` tokens now, leaving `spare_blocks` available.

        For a sequence without blocks that is `match`, then `reserve`; else it is `reserve`, with its `windowed_tokens`.
        Changes nothing. O(1) if the answer is yes without cached blocks, else O(cached blocks).
        """
        missing = self._pool.blocks_for(num_tokens) - len(self._blocks)
        room = self._pool.available_blocks - spare_blocks
        if missing <= 0 or missing <= room:
            return True
        if self._blocks:
            return False
        cached = self._find_prefix()
        num_idle = sum(map(self._pool.is_idle, cached))
        return missing - len(cached) <= room - num_idle

    # Verbs.

    def match(self) -> int:
        """Takes the longest cached prefix, in full blocks, and returns its tokens; at least one known token is left.

        Raises:
            SequenceStateError: the sequence holds blocks already, or was released.
        """
        self._require_live("match")
        if self._blocks:
            raise SequenceStateError(f"cannot match: the sequence holds {len(self._blocks)} blocks; match comes first")
        self._pool.expire()
        found = self._find_prefix()
        self._pool.acquire(found, self._owner)
        self._pool.count_match(hit_blocks=len(found), missed_blocks=self._num_matchable_blocks() - len(found))
        self._generation = self._pool.generation
        self._blocks.extend(found)
        self._set_sealed(len(found))
        return len(found) * self._block_size

    def reserve(self, num_tokens: int, *, windowed_tokens: int | None = None) -> Sequence[int] | None:
        """Makes room for `num_tokens` tokens in all, known or to come.

        Args:
            num_tokens: that have room afterwards, in every table.
            windowed_tokens: that have room in tables with a window, if fewer: for a prompt that is computed in chunks,
                whose first are behind the window before its last are computed.

        Returns:
            The blocks added at the end of the tables, table by table, empty if there was room; None if the pool is
            short, and then nothing has changed.
        """
        missing = -(-num_tokens // self._block_size) - len(self._blocks)
        if missing <= 0:
            return NO_BLOCKS
        self._require_live("reserve")
        added = self._pool.allocate(missing, self._owner)
        if added is None:
            return None
        if not self._blocks:
            self._generation = self._pool.generation
        self._blocks.extend(added)
        return added

    def append(self, token_id: int) -> None:
        self._token_ids.append(token_id)

    def extend(self, token_ids: Iterable[int]) -> None:
        self._token_ids.extend(token_ids)

    def seal(self, num_computed_tokens: int) -> Sequence[int]:
        """Seals the blocks that are full of known ids and computed KV, registers their digests, and returns them.

        That is in every table, one table after the other; void entries are skipped.

        Args:
            num_computed_tokens: the KV of positions `0 .. num_computed_tokens - 1` is computed and final.
                Computed by a step that was launched is enough for other sequences of the same stream; a tier
                that copies on another stream has to wait for the step.

        Raises:
            SequenceStateError: more is computed than there is room for.
        """
        if num_computed_tokens < self._seal_at_tokens:  # most steps of a decode fill no block
            return NO_BLOCKS
        first = self._num_sealed
        end = min(num_computed_tokens, len(self._token_ids)) // self._block_size
        if num_computed_tokens > self.capacity_tokens:
            raise SequenceStateError(
                f"cannot seal {num_computed_tokens} computed tokens: there is room for {self.capacity_tokens}"
            )
        if end <= first:
            return NO_BLOCKS
        self._hash_blocks(end)
        # Blocks taken before a `clear` hold KV of the old weights, which no later request may find.
        is_current = self._generation == self._pool.generation
        sealed = self._seal_blocks(first, end, is_current=is_current)
        self._set_sealed(end)
        if self._pool.listener is not None and is_current:
            self._tell_sealed(self._pool.listener, first, end)
        return sealed

    def free_behind_windows(self, num_computed_tokens: int, *, unsealed: bool = False) -> bool:
        """Gives back what no token from position `num_computed_tokens` on sees; whether that is anything.

        Only tables with a window change. Sealed blocks stay cached. To be called after `seal` with what is computed for
        certain: rows in flight begin there or after it, and who gets a block next writes to it in a later step.

        Args:
            num_computed_tokens: of the sequence, as for `seal`.
            unsealed: also what `seal` has not closed, whose content is then lost: where nothing is to be found again.

        Raises:
            SequenceStateError: more is computed than there is room for.
        """
        return False

    def retain(self, for_s: float, *, num_tokens: int | None = None) -> None:
        """Has what is sealed given up after other idle blocks for so many seconds; see `BlockPool.retain`.

        Args:
            for_s: seconds from now.
            num_tokens: only the blocks that hold the first so many tokens, the last of them in part, too; None for all.
        """
        num_blocks = self._num_sealed
        if num_tokens is not None:
            num_blocks = min(num_blocks, self._pool.blocks_for(num_tokens))
        for table in self.tables:
            sealed = table.held[: max(0, num_blocks - table.num_void)]
            self._pool.retain(sealed, for_s)

    def sealed_heads(self) -> list[int]:
        """Blocks of all tables that are sealed, those of the head first."""
        tables = [table.held[: max(0, self._num_sealed - table.num_void)] for table in self.tables]
        if len(tables) == 1:
            return list(tables[0])
        voids = [table.num_void for table in self.tables]
        placed = [
            (void + at, block_id) for void, held in zip(voids, tables, strict=True) for at, block_id in enumerate(held)
        ]
        return [block_id for _, block_id in sorted(placed)]

    def shrink(self, num_tokens: int) -> int:
        """Gives back the blocks after the first `num_tokens` tokens; the ids stay.

        `shrink(0)` is preemption: the sequence can `match` and `reserve` again. A sequence with windows keeps nothing,
        too, if the next token would see void entries again.

        Returns:
            How many of the `num_tokens` tokens still have room; later positions must be computed (again).
        """
        require_not_negative(num_tokens)
        keep = min(self._pool.blocks_for(num_tokens), len(self._blocks))
        if keep <= self._num_sealed:
            # A sealed block is never written again: the cut one goes back whole.
            keep = min(keep, num_tokens // self._block_size)
        dropped = self._blocks[keep:]
        if dropped:
            del self._blocks[keep:]
            self._set_sealed(min(self._num_sealed, keep))
            dropped.reverse()  # the tail first, so that it is evicted before the head that it is found from
            self._pool.release(dropped)
        return min(num_tokens, keep * self._block_size)

    def truncate(self, num_tokens: int) -> int:
        """Forgets the ids from position `num_tokens` on, and shrinks to it (`shrink`): a rejected speculation.

        Seal only what is accepted and this never meets a sealed block.
        """
        require_not_negative(num_tokens)
        del self._token_ids[num_tokens:]
        del self._digests[len(self._token_ids) // self._block_size :]
        return self.shrink(num_tokens)

    def release(self) -> None:
        """Gives everything back; the sealed blocks stay cached. Releasing again does nothing."""
        if self._released:
            return
        self.shrink(0)
        self._released = True
        if self._on_release is not None:
            self._on_release(self)

    def forget_digests(self) -> None:
        """Its digests are computed again when they are next asked for: the hasher's version of the weights has changed.

        Raises:
            SequenceStateError: it holds blocks, which have digests of the old version.
        """
        if self.capacity_tokens:
            raise SequenceStateError("a sequence that holds blocks cannot begin anew; shrink it to 0 first")
        self._digests.clear()

    # Integrity.

    def check_integrity(self) -> None:
        if not 0 <= self._num_sealed <= min(len(self._blocks), len(self._digests)):
            raise IntegrityError(
                f"{self._num_sealed} of {len(self._blocks)} blocks sealed, {len(self._digests)} digests"
            )
        if len(self._digests) * self._block_size > len(self._token_ids):
            raise IntegrityError(f"{len(self._digests)} digests for {len(self._token_ids)} ids")
        if self._digests != self._hasher.chain(self._root, self._token_ids)[: len(self._digests)]:
            raise IntegrityError("the digests are not those of the ids")
        if self._released and self._blocks:
            raise IntegrityError(f"a released sequence holds {len(self._blocks)} blocks")

    # What tables with windows do otherwise.

    def _num_cached_blocks(self) -> int:
        """Blocks of the longest cached prefix."""
        return len(self._find_prefix())

    def _seal_blocks(self, first: int, end: int, *, is_current: bool) -> Sequence[int]:
        sealed = self._blocks[first:end]
        self._pool.seal(sealed, self._digests[first:end] if is_current else None)
        return sealed

    def _tell_sealed(self, listener: BlockListener, first: int, end: int) -> None:
        self._tell(listener, self.tables[0], first, end)

    # Private.

    def _num_matchable_blocks(self) -> int:
        # The last known token is computed in any case: its logits are what is sampled from.
        return max(len(self._token_ids) - 1, 0) // self._block_size

    def _find_prefix(self, table: int = 0) -> list[int]:
        """One table's blocks of the longest prefix cached for it; hashes a few blocks past it at most."""
        num_matchable = self._num_matchable_blocks()
        found: list[int] = []
        while len(found) < num_matchable:
            first = len(found)
            end = min(first + _HASH_AHEAD_BLOCKS, num_matchable)
            self._hash_blocks(end)
            found.extend(self._pool.find_prefix(table_digests(self._digests[first:end], table)))
            if len(found) < end:
                break
        return found

    def _hash_blocks(self, end: int) -> None:
        if len(self._digests) < end:
            self._hasher.extend_chain(self._digests, self._root, self._token_ids, num_blocks=end)

    def _tell(self, listener: BlockListener, table: BlockTable, begin: int, end: int) -> None:
        # Duplicates are left out: the first copy is the one that is found, and was told of when it was sealed.
        first = max(begin - 1, 0)  # with the parent
        digests = table_digests(self._digests[first:end], table.index)
        while begin < end:
            stop = begin
            while stop < end and self._pool.find(digests[stop - first]) == table.blocks[stop]:
                stop += 1
            if stop > begin:
                listener.stored(
                    StoredBlocks(
                        parent=digests[begin - 1 - first] if begin else None,
                        digests=digests[begin - first : stop - first],
                        token_ids=self._token_ids[begin * self._block_size : stop * self._block_size],
                        lora_name=self._lora_name,
                        cache_salt=self._cache_salt,
                        table=table.index,
                    )
                )
            begin = stop + 1

    def _set_sealed(self, num_sealed: int) -> None:
        self._num_sealed = num_sealed
        self._seal_at_tokens = (num_sealed + 1) * self._block_size

    def _require_live(self, verb: str) -> None:
        if self._released:
            raise SequenceStateError(f"cannot {verb}: the sequence was released")


def require_not_negative(num_tokens: int) -> None:
    if num_tokens < 0:
        raise SequenceStateError(f"cannot keep {num_tokens} tokens")
