"""`begin_table_load`: what KV tiers have of a sequence's prefix beyond its match, on its way into its block tables.

    matched ─── begin_table_load ──► loading ─── is_over, finish ──┬─► all of it: sealed, begins after it
       │ nothing found                                             └─► less: see below
       └──► computed

With one table the longest chain that the tiers hold is loaded, and what has completed of it is kept. With windows a
prefix is of use where every table has what is seen after it:

    table 0, no window   | m | m | p | t | t | t |        m matched   p in the pool   t in the tiers
    table 1, a window    | · | · | · | · | p | t |        the longest prefix whose window is somewhere

So all of it or nothing: after a load that completes in part the sequence holds no blocks, and is matched again.
"""

from collections.abc import Sequence

from openinfer_kv_cache.block_table import BlockTable
from openinfer_kv_cache.digest import Digest, table_digest
from openinfer_kv_cache.sequence import BlockSequence
from openinfer_kv_cache.tiers.port import PrefixHit, TierPort, TierTransfer
from openinfer_kv_cache.windowed_sequence import WindowedSequence

_MOST_BOUNDARIES = 1024  # after which tiers are asked for windows: a few milliseconds


class TableLoad:
    """Blocks on their way into one sequence, which until `finish` has no row and gives no block back."""

    def __init__(self, kv: BlockSequence, transfer: TierTransfer | None, *, num_tokens: int) -> None:
        self._kv = kv
        self._transfer = transfer  # None: the tiers could not begin it
        self._begin_tokens = kv.num_sealed_blocks * kv.block_size_tokens
        self._end_tokens = num_tokens
        self.loaded_tokens = 0
        """After `finish`: by which the prefix has become longer."""

    @property
    def num_blocks(self) -> int:
        return 0 if self._transfer is None else self._transfer.num_blocks

    @property
    def completed_blocks(self) -> int:
        return 0 if self._transfer is None else self._transfer.completed_blocks

    def is_over(self) -> bool:
        return self._transfer is None or self._transfer.is_over()

    def cancel(self) -> None:
        if self._transfer is not None:
            self._transfer.cancel()

    def finish(self) -> int | None:
        """Takes what has arrived into the sequence, once the load is over.

        Returns:
            The tokens after which the sequence begins; None if it holds no blocks now and is to be matched again.
        """
        is_complete = self.num_blocks > 0 and self.completed_blocks == self.num_blocks
        if is_complete:
            end_tokens = self._end_tokens
        elif isinstance(self._kv, WindowedSequence):
            self._kv.shrink(0)
            return None
        else:
            end_tokens = self._begin_tokens + self.completed_blocks * self._kv.block_size_tokens
        self._kv.seal(end_tokens)
        self.loaded_tokens = end_tokens - self._begin_tokens
        return end_tokens


def begin_table_load(port: TierPort, kv: BlockSequence) -> TableLoad | None:
    """Asks the tiers for what follows the match of a sequence with reserved blocks, and begins to load it.

    Of a sequence with windows all tables are placed anew: afterwards they have the blocks of the prefix that is loaded.

    Returns:
        None if nothing is found, or the pool has no room for it; then nothing has changed.
    """
    if isinstance(kv, WindowedSequence):
        return _begin_windowed(port, kv)
    first = kv.num_sealed_blocks
    transfer = port.load(port.find(kv.matchable_digests()[first:]), kv.blocks[first:])
    if transfer is None:
        return None
    return TableLoad(kv, transfer, num_tokens=(first + transfer.num_blocks) * kv.block_size_tokens)


def _begin_windowed(port: TierPort, kv: WindowedSequence) -> TableLoad | None:
    found = _Search(port, kv)
    end = found.end
    if found.num_blocks and kv.place_prefix(end):
        places = [kv.tables[index].blocks[entry] for index, entries in found.entries.items() for entry in entries]
        transfer = port.load(found.take(), places)
        return TableLoad(kv, transfer, num_tokens=end * kv.block_size_tokens)
    found.close()
    return None


class _Search:
    """The longest prefix that the pool and the tiers have together, and what of it is in the tiers, held."""

    def __init__(self, port: TierPort, kv: WindowedSequence) -> None:
        self._port = port
        self._kv = kv
        self._digests = kv.matchable_digests()
        self._hits: dict[int, PrefixHit] = {}
        self.entries: dict[int, Sequence[int]] = {}
        """Of each table what is in the tiers, in the order in which they hold it."""
        self.end = len(self._digests)
        self._find_chains()
        self._find_windows()
        if self.end <= kv.num_sealed_blocks or not self._cut_chains():
            self.close()

    @property
    def num_blocks(self) -> int:
        return sum(hit.num_blocks for hit in self._hits.values())

    def take(self) -> PrefixHit:
        """What was found, in the order of `entries`, for the caller to load."""
        hits, self._hits = self._hits, {}
        return PrefixHit([each for index in self.entries for each in hits[index].hits])

    def close(self) -> None:
        for hit in self._hits.values():
            hit.close()
        self._hits = {}

    def _find_chains(self) -> None:
        for table in self._kv.tables:
            if table.window_tokens is None:
                missing = self._find(table, self._kv.lacking_blocks(table, self.end))
                self.end = self.end if missing is None else missing

    def _find_windows(self) -> None:
        windowed = [table for table in self._kv.tables if table.window_tokens is not None]
        for _ in range(_MOST_BOUNDARIES):
            missing = self._find_all(windowed) if self.end > self._kv.num_sealed_blocks else None
            if missing is None:
                return
            self.end = missing
        self.end = 0

    def _find_all(self, tables: Sequence[BlockTable]) -> int | None:
        """Finds what these tables lack before the end, or the first entry from there that none has."""
        for table in tables:
            # From the last one on: of entries that are missing the last decides how long the prefix can be.
            missing = self._find(table, self._kv.lacking_blocks(table, self.end)[::-1])
            if missing is not None:
                return missing
        return None

    def _find(self, table: BlockTable, lacking: Sequence[int]) -> int | None:
        """Holds what a table lacks, in this order; the first entry that the tiers do not have."""
        if table.index in self._hits:
            self._hits[table.index].close()
        hit = self._hits[table.index] = self._port.find(self._digests_of(table.index, lacking))
        self.entries[table.index] = lacking[: hit.num_blocks]
        return lacking[hit.num_blocks] if hit.num_blocks < len(lacking) else None

    def _cut_chains(self) -> bool:
        """Gives back what is beyond the end; whether the tiers still have all before it."""
        for table in self._kv.tables:
            if table.window_tokens is None:
                entries = [entry for entry in self.entries[table.index] if entry < self.end]
                hit = self._hits[table.index]
                held = hit.take_back(len(entries))
                # A chunk that goes beyond the end was given back whole: its beginning is asked for again.
                hit.hits += self._port.find(self._digests_of(table.index, entries[held:])).hits
                if hit.num_blocks < len(entries):
                    return False
                self.entries[table.index] = entries
        return True

    def _digests_of(self, index: int, entries: Sequence[int]) -> list[Digest]:
        return [table_digest(self._digests[entry], index) for entry in entries]
