"""`Snapshots`: states of sequences at block boundaries, so that others with the same prefix can begin there.

A recurrent state cannot be set back, so a prefix is reused only where KV blocks and a copy of the states end at the
same boundary. Copies are taken where they are likely to be found again: at the last boundary of a prompt, and where a
prompt leaves a prefix that is cached already, since a third one may leave it there, too; and where the block begins
that holds the end of a prefix which its client asks to retain, if no other copy is near. A row ends at such a place,
and the states are copied after its step; a restored sequence's are copied before its first.

The slots that sequences run in are the pool's first ones, live for ever; copies have those after them. KV tiers fill
copies while steps run (`begin_load`), and read those that are held (`hold`).
"""

from collections.abc import Iterable

from openinfer_core.errors import ContractViolation
from openinfer_core.scheduling import StateCopy
from openinfer_kv_cache import BlockSequence, Digest, StateSlotCopy, StateSlotPool


class Snapshots:
    """Copies of states, found by the digest of the prefix they end."""

    def __init__(self, pool: StateSlotPool, *, num_running_slots: int, block_size_tokens: int) -> None:
        self._pool = pool
        self._block_tokens = block_size_tokens
        slots = [pool.allocate() for _ in range(num_running_slots)]
        if slots != list(range(num_running_slots)):
            raise ContractViolation(f"the slots that sequences run in must be the pool's first ones, not {slots}")
        self._loaded: set[int] = set()  # slots that a tier has filled since a step last did

    @property
    def max_snapshots(self) -> int:
        return self._pool.max_snapshots

    @property
    def num_snapshots(self) -> int:
        return self._pool.num_snapshots

    @property
    def evicted_snapshots(self) -> int:
        return self._pool.evicted_snapshots

    def longest_prefix(self, kv: BlockSequence, cached_tokens: int) -> int:
        """Tokens up to the last boundary within the cached ones whose states are kept; 0 if there is none."""
        digests = kv.prefix_digests()
        for num_blocks in range(cached_tokens // self._block_tokens, 0, -1):
            if self._pool.find(digests[num_blocks - 1]) is not None:
                return num_blocks * self._block_tokens
        return 0

    def has(self, digest: Digest) -> bool:
        return self._pool.find(digest) is not None

    def has_after(self, kv: BlockSequence, num_tokens: int) -> bool:
        return self.has(self._digest(kv, num_tokens))

    def positions(
        self, *, matched_tokens: int, begin_tokens: int, known_tokens: int, prefix_ends: Iterable[int] = ()
    ) -> tuple[int, ...]:
        """Where the states of a sequence are to be kept, ascending.

        Args:
            matched_tokens: of its prefix, those whose KV was in the cache.
            begin_tokens: where it begins to compute.
            known_tokens: its ids; at least the last of them is always computed.
            prefix_ends: tokens of its prefixes that are to be retained.
        """
        size = self._block_tokens
        positions = {matched_tokens, (known_tokens - 1) // size * size}
        for end in prefix_ends:
            begin = end // size * size
            if positions.isdisjoint((begin, begin + size)):
                positions.add(begin)
        return tuple(sorted(position for position in positions if position > begin_tokens))

    def retain(self, kv: BlockSequence, *, for_s: float, num_tokens: int | None = None) -> None:
        """Has the states at the last boundary that are kept of a sequence given up after others; see the pool.

        With `num_tokens`, those at the last one up to the end of the block that holds the last of so many tokens.
        """
        num_blocks = kv.num_sealed_blocks
        if num_tokens is not None:
            num_blocks = min(num_blocks, -(-num_tokens // self._block_tokens))
        num_tokens = self.longest_prefix(kv, num_blocks * self._block_tokens)
        if num_tokens:
            self._pool.retain(self._digest(kv, num_tokens), for_s)

    def restore(self, kv: BlockSequence, num_tokens: int, slot: int) -> StateCopy:
        """The copy that brings the states after `num_tokens` into a slot, before the step that is planned now."""
        copy = self._pool.begin_restore(self._digest(kv, num_tokens), slot)
        if copy is None or copy.num_tokens != num_tokens:
            raise ContractViolation(f"the states after {num_tokens} tokens were there and cannot be restored")
        # Completed at once: steps run in order, so what writes to its source next does it later.
        self._pool.complete(copy)
        loaded_tokens = num_tokens if copy.source in self._loaded else None
        return StateCopy(source=copy.source, target=copy.target, loaded_tokens=loaded_tokens)

    def take(self, kv: BlockSequence, num_tokens: int, slot: int) -> StateSlotCopy | None:
        """The copy to run after the step that computes up to `num_tokens`, then `end`; None if none is to be made."""
        copy = self._pool.begin_snapshot(slot, self._digest(kv, num_tokens), num_tokens=num_tokens)
        if copy is not None:
            self._loaded.discard(copy.target)
        return copy

    def begin_load(self, digest: Digest, num_tokens: int) -> StateSlotCopy | None:
        """The copy that fills a snapshot from a tier, which no step touches meanwhile; None if there is no room."""
        copy = self._pool.begin_load(digest, num_tokens=num_tokens)
        if copy is not None:
            self._loaded.add(copy.target)
        return copy

    def hold(self, digest: Digest) -> StateSlotCopy | None:
        """Keeps a snapshot as it is until `end`; None if there is no such snapshot."""
        return self._pool.begin_hold(digest)

    def hold_after(self, kv: BlockSequence, num_tokens: int) -> StateSlotCopy | None:
        return self.hold(self._digest(kv, num_tokens))

    def end(self, copy: StateSlotCopy, *, good: bool) -> None:
        """What filled or read a snapshot is over; one that was filled can be found from now on if it is good."""
        if good:
            self._pool.complete(copy)
        else:
            self._pool.cancel(copy)

    def _digest(self, kv: BlockSequence, num_tokens: int) -> Digest:
        return kv.prefix_digests()[num_tokens // self._block_tokens - 1]
