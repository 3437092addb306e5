"""`StatePrefixes`: where sequences of a model with recurrent states can begin, with KV tiers.

A prefix is of use where KV and states end at the same boundary, and each may be in the pool or in the tiers:

    0 ──── blocks in the pool ────► matched ──── blocks in the tiers ────► known
                          the deepest boundary up to here with states, in a slot or in the tiers: there it begins

Tiers keep states in chunks of a block's size under names of their own (`PrefixHasher.state_digests`). States that are
loaded fill a snapshot, from which the sequence is restored as from every other, and others after it.
"""

from collections.abc import Iterable
from collections.abc import Sequence as ListLike
from dataclasses import dataclass

from openinfer_engine.scheduler.states.load import StateLoad
from openinfer_engine.scheduler.states.snapshots import Snapshots
from openinfer_kv_cache import BlockSequence, CopyKind, Digest, PrefixHasher, PrefixHit, StateSlotCopy, TierPort

_MOST_BOUNDARIES = 1024  # that tiers are asked for states of: a few milliseconds


@dataclass(frozen=True, slots=True, eq=False)
class StatePrefixHit:
    """What the tiers have of a sequence's prefix, held until its load begins."""

    known_tokens: int  # up to where blocks are known, here or there
    end_tokens: int  # where the sequence begins
    blocks: PrefixHit
    states: PrefixHit
    copy: StateSlotCopy | None  # of the snapshot that it begins on; None if the tiers bring it no further


class StatePrefixes:
    """Asks tiers, and begins loads."""

    def __init__(self, snapshots: Snapshots, port: TierPort, hasher: PrefixHasher, *, block_size_tokens: int) -> None:
        self._snapshots = snapshots
        self._port = port
        self._hasher = hasher
        self._block_tokens = block_size_tokens

    def find(self, kv: BlockSequence, *, matched_tokens: int, cached_tokens: int) -> StatePrefixHit:
        """The deepest boundary that the tiers can bring a sequence to, which could begin at `cached_tokens` without."""
        digests, matched_blocks = kv.matchable_digests(), matched_tokens // self._block_tokens
        blocks = self._port.find(digests[matched_blocks:])
        known_tokens = matched_tokens + blocks.num_blocks * self._block_tokens
        end_tokens, states = self._find_states(digests, begin_tokens=cached_tokens, end_tokens=known_tokens)
        copy = None
        if end_tokens > cached_tokens:
            blocks = self._cut(blocks, digests[matched_blocks : end_tokens // self._block_tokens])
            copy = self._begin_copy(digests[end_tokens // self._block_tokens - 1], end_tokens, states)
        if copy is None:
            end_tokens = cached_tokens
            blocks.close()
            states.close()
        return StatePrefixHit(known_tokens, end_tokens, blocks, states, copy)

    def begin(self, kv: BlockSequence, found: StatePrefixHit, *, cached_tokens: int) -> StateLoad | None:
        """Begins to load what was found, into reserved blocks and the snapshot; None if that is nothing."""
        if found.copy is None:
            return None
        begin, end = kv.num_sealed_blocks, found.end_tokens // self._block_tokens
        states = self._port.load(found.states, self._port.state_places(found.copy.target))
        return StateLoad(
            end_tokens=found.end_tokens,
            cached_tokens=cached_tokens,
            copy=found.copy,
            blocks=self._port.load(found.blocks, kv.blocks[begin:end]),
            num_blocks=end - begin,
            states=states,
            num_chunks=self._port.chunks_per_slot if found.copy.kind is CopyKind.LOAD else 0,
        )

    def is_coming(self, kv: BlockSequence, *, cached_tokens: int, loads: Iterable[StateLoad]) -> bool:
        digests = kv.matchable_digests()
        return any(
            cached_tokens < load.end_tokens <= len(digests) * self._block_tokens
            and load.copy.digest == digests[load.end_tokens // self._block_tokens - 1]
            for load in loads
        )

    def _find_states(self, digests: ListLike[Digest], *, begin_tokens: int, end_tokens: int) -> tuple[int, PrefixHit]:
        """The deepest boundary after `begin_tokens` with states, and these if they are in the tiers alone."""
        nothing = PrefixHit([])
        first = max(begin_tokens, end_tokens - _MOST_BOUNDARIES * self._block_tokens)
        for tokens in range(end_tokens, first, -self._block_tokens):
            digest = digests[tokens // self._block_tokens - 1]
            if self._snapshots.has(digest):
                return tokens, nothing
            states = self._find_chunks(digest)
            if states.num_blocks:
                return tokens, states
        return begin_tokens, nothing

    def _find_chunks(self, digest: Digest) -> PrefixHit:
        """All chunks of the states after a prefix, or none; most prefixes have none."""
        first = self._port.find(self._hasher.state_digests(digest, 1))
        if not first.num_blocks:
            return first
        first.close()
        num_chunks = self._port.chunks_per_slot
        states = self._port.find(self._hasher.state_digests(digest, num_chunks))
        if states.num_blocks < num_chunks:
            states.close()
        return states

    def _cut(self, found: PrefixHit, digests: ListLike[Digest]) -> PrefixHit:
        """What was found, as far as these digests go; chunks that go further are asked for again."""
        held = found.take_back(len(digests))
        return PrefixHit([*found.hits, *self._port.find(digests[held:]).hits])

    def _begin_copy(self, digest: Digest, num_tokens: int, states: PrefixHit) -> StateSlotCopy | None:
        if states.num_blocks:
            return self._snapshots.begin_load(digest, num_tokens)
        return self._snapshots.hold(digest)
