"""`BlockAllocator`: blocks for sequences that are to run, those of their prefix that are in the cache first.

Each block table gets them for every id that a sequence knows; one with a window only for those that it holds at a time.

A model with recurrent states shares a prefix up to where copies of the states are, in a slot or in KV tiers; what of it
is cached beyond that is computed again, and given back before.
"""

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as ListLike
from dataclasses import dataclass

from openinfer_core.errors import ContractViolation
from openinfer_engine.scheduler.sequence import Sequence
from openinfer_engine.scheduler.states.load import StateLoad
from openinfer_engine.scheduler.states.prefixes import StatePrefixes, StatePrefixHit
from openinfer_engine.scheduler.states.snapshots import Snapshots
from openinfer_engine.scheduler.windows import Windows
from openinfer_kv_cache import BlockPool, BlockSequence

_MOST_COMPUTED_TOKENS = 512
"""Of a prompt that begins on what is in the pool and does not wait for another's load."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockAllocation:
    """A sequence's blocks."""

    cached_tokens: int  # tokens of the pool after which it can begin
    found: StatePrefixHit | None = None  # what tiers have beyond that, for a model with recurrent states


class BlockAllocator:
    """Takes blocks from one pool, for `num_tables` block tables of each sequence.

    Args:
        hurry: called when they are short.
        runs: whether a tenant has anything that runs or loads.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        num_tables: int,
        windows: Windows | None,
        matches_prefixes: bool,
        snapshots: Snapshots | None,
        hurry: Callable[[], None],
        runs: Callable[[str], bool],
    ) -> None:
        self._pool = pool
        self._num_tables = num_tables
        self._windows = windows
        self._matches_prefixes = matches_prefixes
        self._snapshots = snapshots
        self._hurry = hurry
        self._runs = runs
        self.prefixes: StatePrefixes | None = None  # with KV tiers, for a model with recurrent states

    def allocate(
        self,
        sequence: Sequence,
        *,
        running: ListLike[Sequence],
        loading: ListLike[Sequence],
        kept_blocks: int = 0,
        kept_for: Mapping[str, int] | None = None,
    ) -> BlockAllocation | None:
        """Takes blocks for every id a sequence knows; each that runs or loads keeps one per table in reserve.

        `kept_blocks` more are left for others, and `kept_for` for these tenants, prefixes that they keep among them.

        None, with nothing changed, if blocks are short, or others compute or load what it needs first.
        """
        # One block per table stays spare: a newcomer that took the last ones would be preempted at their next block.
        kv, spare_blocks = sequence.kv, self._num_tables * (len(running) + len(loading))
        windowed_tokens = self._windowed_tokens(sequence, is_alone=not spare_blocks)
        protected = self._protected_blocks(sequence, spare_blocks)
        for tenant, num_blocks in (kept_for or {}).items():
            # A tenant that comes back begins on its prefixes, or gives them up: they are room for it already.
            kept_blocks += max(0, num_blocks - protected.get(tenant, 0))
        spare_blocks += sum(protected.values()) + kept_blocks
        spare_blocks += self._conversation_blocks(sequence, spare_blocks, loading)
        if not kv.would_fit(sequence.known_tokens, spare_blocks=spare_blocks, windowed_tokens=windowed_tokens):
            self._hurry()
            return None
        if not (self._matches_prefixes and sequence.may_match):
            allocation = self._match_nothing(sequence, spare_blocks, windowed_tokens)
        elif self._snapshots is not None:
            allocation = self._match_states(sequence, self._snapshots, spare_blocks, loading)
        elif self._is_being_computed(kv, running, loading):
            return None  # it waits, rather than compute the same prefix a second time
        else:
            allocation = BlockAllocation(kv.match())
        if allocation is not None and kv.reserve(sequence.known_tokens, windowed_tokens=windowed_tokens) is None:
            raise ContractViolation(f"blocks for request {sequence.request_id} were there and could not be reserved")
        return allocation

    def would_fit(self, sequence: Sequence, *, num_active: int, coming_blocks: int) -> bool:
        """Whether `allocate` would find room beside `num_active` others, with so many blocks more."""
        spare_blocks = self._num_tables * num_active
        windowed_tokens = self._windowed_tokens(sequence, is_alone=not spare_blocks)
        spare_blocks += sum(self._protected_blocks(sequence, spare_blocks).values()) - coming_blocks
        return sequence.kv.would_fit(sequence.known_tokens, spare_blocks=spare_blocks, windowed_tokens=windowed_tokens)

    def _protected_blocks(self, sequence: Sequence, spare_blocks: int) -> Mapping[str, int]:
        """Prefixes that other tenants keep from one that runs something, by tenant.

        What that has comes back for its next request. One that has nothing would wait for what others run, with all
        that comes after it, and a prompt that is larger than its share until nothing runs.
        """
        if not spare_blocks or self._pool.free_blocks >= self._blocks_for(sequence.known_tokens, None) + spare_blocks:
            return {}
        tenant = sequence.request.tenant
        return self._pool.protected_by_owner(tenant) if self._runs(tenant) else {}

    def _conversation_blocks(self, sequence: Sequence, spare_blocks: int, loading: ListLike[Sequence]) -> int:
        """Conversations that its tenant keeps, while another load of that tenant is under way.

        Loads share one link to the device: one after the other they take no longer, hold blocks for less time, and what
        would have made room for them needs no load.
        """
        kept_blocks, tenant = self._pool.kept_idle_blocks, sequence.request.tenant
        if not (kept_blocks and sequence.may_match and any(each.request.tenant == tenant for each in loading)):
            return 0
        blocks = self._blocks_for(sequence.known_tokens, None)
        if self._pool.available_blocks - kept_blocks >= blocks + spare_blocks:
            return 0
        cached_blocks = self._num_tables * (sequence.kv.count_cached_tokens() // self._pool.block_size_tokens)
        if cached_blocks >= blocks - self._num_tables * self._pool.blocks_for(_MOST_COMPUTED_TOKENS):
            return 0
        return max(0, kept_blocks - cached_blocks)

    def _windowed_tokens(self, sequence: Sequence, *, is_alone: bool) -> int | None:
        """Tokens that tables with a window get room for, before the sequence begins; None: for all."""
        if self._windows is None:
            return None
        may_match = self._matches_prefixes and sequence.may_match
        cached_tokens = sequence.kv.count_cached_tokens() if may_match else 0
        if is_alone:
            return cached_tokens + 1  # it goes on with what there is, and that was found to be enough
        return self._windows.lasting_tokens(cached_tokens, sequence.known_tokens)

    def _match_nothing(
        self, sequence: Sequence, spare_blocks: int, windowed_tokens: int | None
    ) -> BlockAllocation | None:
        if not self._would_fit_after(sequence, 0, spare_blocks, windowed_tokens):
            self._hurry()
            return None
        if self._snapshots is not None:
            sequence.snapshot_positions = self._snapshots.positions(
                matched_tokens=0,
                begin_tokens=0,
                known_tokens=sequence.known_tokens,
                prefix_ends=_prefix_ends(sequence),
            )
        return BlockAllocation(0)

    def _match_states(
        self, sequence: Sequence, snapshots: Snapshots, spare_blocks: int, loading: ListLike[Sequence]
    ) -> BlockAllocation | None:
        """Takes what is in the cache up to where states are, or can be loaded, if there is room for the rest."""
        kv = sequence.kv
        matched_tokens = known_tokens = kv.match()
        cached_tokens = begin_tokens = snapshots.longest_prefix(kv, matched_tokens)
        if self._is_coming(kv, cached_tokens, loading):
            kv.shrink(0)
            return None
        if not self._would_fit_after(sequence, cached_tokens, spare_blocks):
            kv.shrink(0)
            self._hurry()
            return None
        found = None
        if self.prefixes is not None and not sequence.asked_tiers:
            sequence.asked_tiers = True
            found = self.prefixes.find(kv, matched_tokens=matched_tokens, cached_tokens=cached_tokens)
            begin_tokens, known_tokens = found.end_tokens, found.known_tokens
        kv.shrink(min(begin_tokens, matched_tokens))
        sequence.snapshot_positions = snapshots.positions(
            matched_tokens=known_tokens,
            begin_tokens=begin_tokens,
            known_tokens=sequence.known_tokens,
            prefix_ends=_prefix_ends(sequence),
        )
        return BlockAllocation(cached_tokens, found)

    def _would_fit_after(
        self, sequence: Sequence, num_tokens: int, spare_blocks: int, windowed_tokens: int | None = None
    ) -> bool:
        """Whether there is room for all known tokens if only the first `num_tokens` stay shared."""
        pool, kept = self._pool, num_tokens // self._pool.block_size_tokens
        given_back = sum(pool.num_users(block_id) == 1 for block_id in sequence.kv.blocks[kept:])
        missing_blocks = self._blocks_for(sequence.known_tokens, windowed_tokens) - kept
        return missing_blocks + spare_blocks <= pool.available_blocks + given_back

    def _blocks_for(self, num_tokens: int, windowed_tokens: int | None) -> int:
        blocks = self._pool.blocks_for(num_tokens)
        if self._windows is None or windowed_tokens is None:
            return self._num_tables * blocks
        num_windowed = self._windows.num_windowed
        return (self._num_tables - num_windowed) * blocks + num_windowed * self._pool.blocks_for(windowed_tokens)

    def _is_coming(self, kv: BlockSequence, cached_tokens: int, loading: ListLike[Sequence]) -> bool:
        loads = [each.load for each in loading if isinstance(each.load, StateLoad)]
        return self.prefixes is not None and self.prefixes.is_coming(kv, cached_tokens=cached_tokens, loads=loads)

    def _is_being_computed(self, kv: BlockSequence, running: ListLike[Sequence], loading: ListLike[Sequence]) -> bool:
        block_tokens = self._pool.block_size_tokens
        return any(
            other.kv.num_sealed_blocks < other.prompt_tokens // block_tokens and kv.would_wait_for(other.kv)
            for others in (running, loading)
            for other in others
        )


def _prefix_ends(sequence: Sequence) -> Iterable[int]:
    return (prefix.num_tokens for prefix in sequence.request.retained_prefixes)
