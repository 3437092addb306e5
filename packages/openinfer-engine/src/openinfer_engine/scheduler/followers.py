"""`Followers`: sequences that wait for another one to compute a prefix that both have, and let others pass meanwhile.

Sub-agents begin with what their parent said, and often at one moment. The first of them to be admitted, the *leader*,
computes the common prefix; the others follow it: they are out of the waiting queue, without slot and blocks, and what
comes after them is served. As soon as the leader has computed what is common, or runs no longer, they come before all
that waits, in the order in which they came.

    waiting ── a leader computes its prefix ──► following ── computed, or the leader is gone ──► admitted, as if waiting

So one is passed for as long as its leader computes, which depends on the prefix alone: chunks of what has begun come
before newcomers. From the bound of `order/bypass.py` on those that pass leave it a sequence slot and blocks. A follower
may find that another computes the next part of its prefix, and follow that one.

A model with recurrent states shares a prefix where a copy of the states is. The leader keeps one at the end of what is
common (`snapshot_positions`), unless it is beyond that already.
"""

from collections.abc import Sequence as ListLike
from dataclasses import dataclass

from openinfer_engine.scheduler.sequence import Sequence, SequenceState
from openinfer_engine.scheduler.states.snapshots import Snapshots
from openinfer_kv_cache import Digest

MAX_FOLLOWERS = 64
"""With as many, the next one waits at the head of the queue."""
MAX_POSITIONS = 8
"""Places at which one sequence keeps its states."""
LEAST_COMMON_TOKENS = 64
"""Of a model with recurrent states: fewer are computed again in less time than a copy of the states is worth."""


@dataclass(frozen=True, slots=True, eq=False)
class Following:
    """A leader, and up to which block the follower waits for it; None: as far as it computes what is common."""

    leader: Sequence
    num_blocks: int | None = None


class Followers:
    """Of one run queue."""

    def __init__(self, *, block_size_tokens: int, snapshots: Snapshots | None) -> None:
        self._block_tokens = block_size_tokens
        self._snapshots = snapshots
        self._following: dict[Sequence, Following] = {}

    def __len__(self) -> int:
        return len(self._following)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._following

    @property
    def sequences(self) -> ListLike[Sequence]:
        """In the order in which they came."""
        return list(self._following)

    def find(self, sequence: Sequence, *, running: ListLike[Sequence], loading: ListLike[Sequence]) -> Following | None:
        """Who computes now what the sequence would compute a second time; None if none does, or it cannot wait.

        A running one that has states is told where to keep them.
        """
        if self._snapshots is not None:
            return self._find_states(sequence, running, self._snapshots)
        for others in (running, loading):
            for other in others:
                if self._computes_for(other, sequence):
                    return Following(other)
        return None

    def own_blocks(self, sequence: Sequence) -> int:
        """Blocks that a follower needs beside those that its leader computes."""
        mine, leader = sequence.kv.matchable_digests(), self._following[sequence].leader
        return -(-sequence.known_tokens // self._block_tokens) - self._common_blocks(mine, leader)

    def add(self, sequence: Sequence, following: Following) -> None:
        self._following[sequence] = following

    def remove(self, sequence: Sequence) -> None:
        del self._following[sequence]

    def is_waiting(self, sequence: Sequence) -> bool:
        """Whether a follower's leader still computes what it waits for."""
        following = self._following[sequence]
        leader = following.leader
        if leader.state not in (SequenceState.RUNNING, SequenceState.LOADING):
            return False
        if following.num_blocks is not None:
            return leader.kv.num_sealed_blocks < following.num_blocks
        return self._computes_for(leader, sequence)

    def _computes_for(self, other: Sequence, sequence: Sequence) -> bool:
        num_blocks = other.prompt_tokens // self._block_tokens
        return other.kv.num_sealed_blocks < num_blocks and sequence.kv.would_wait_for(other.kv)

    def _find_states(self, sequence: Sequence, running: ListLike[Sequence], snapshots: Snapshots) -> Following | None:
        mine = sequence.kv.matchable_digests()
        cached_tokens: int | None = None
        for other in running:
            num_blocks = self._common_blocks(mine, other)
            if num_blocks * self._block_tokens < LEAST_COMMON_TOKENS:
                continue
            if cached_tokens is None:
                cached_tokens = snapshots.longest_prefix(sequence.kv, sequence.kv.count_cached_tokens())
            gained_tokens = num_blocks * self._block_tokens - cached_tokens
            if gained_tokens >= LEAST_COMMON_TOKENS and self._keeps_states(other, num_blocks):
                return Following(other, num_blocks)
        return None

    def _common_blocks(self, mine: ListLike[Digest], other: Sequence) -> int:
        """Blocks that both begin with, of those that the other was given and has still to compute."""
        theirs = other.kv.prefix_digests()
        most = min(len(mine), other.given_tokens // self._block_tokens)
        if not most or mine[0] != theirs[0] or other.kv.num_sealed_blocks >= most:
            return 0
        least = 1  # a digest binds all before it, so where one is equal, so are those before it
        while least < most:
            middle = (least + most + 1) // 2
            if mine[middle - 1] == theirs[middle - 1]:
                least = middle
            else:
                most = middle - 1
        return 0 if other.kv.num_sealed_blocks >= least else least

    def _keeps_states(self, other: Sequence, num_blocks: int) -> bool:
        position = num_blocks * self._block_tokens
        if position in other.snapshot_positions:
            return True
        if other.computed_tokens >= position or len(other.snapshot_positions) >= MAX_POSITIONS:
            return False
        other.snapshot_positions = tuple(sorted((*other.snapshot_positions, position)))
        return True
