"""`Conversations`: which prefixes are kept whole while more conversations take turns than the pool holds.

A turn of a conversation begins with the prompt of its last one; the answer may come back written otherwise, without its
thinking for one. In a cycle of conversations that is larger than the pool, the one used least recently is the next to
go on, so that order of eviction gives each up just before it is needed. As LIRS does for pages (Jiang and Zhang,
SIGMETRICS 2002), conversations are chosen that are given up after all others:

    first turn ── ends ──► known ── goes on, and there is room, or one that is kept has not gone on since ──► kept
                             ▲                                                                                │
                             └────────────────── another takes its room ──────────────────────────────────────┘

Room is `KEPT_SHARE` of the owner's share of the pool; where there is less than a conversation holds, its head is kept.
One that did not go on between two turns of another loses its place to it. What comes once is never kept.

It is an order of eviction, as retention is, and no pin: what clients ask to retain goes after it, and each owner's
conversations compete with its own alone.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from openinfer_kv_cache.blocks import BlockPool
from openinfer_kv_cache.digest import Digest
from openinfer_kv_cache.sequence import BlockSequence

KEPT_SHARE = 0.75
"""The rest is for what runs, begins, or comes once."""
LEAST_SHARE = 1 / 256
"""Of the owner's share: shorter ones are not kept, so that there are few, and to look at all of them is quick."""
TAIL_TOKENS = 16
"""Of a prompt, with which a template begins the answer: the next turn may have it otherwise, as the answer itself."""
MAX_ENDS = 8192
"""Turns whose continuation is known for one; the oldest are forgotten."""


class EndedTurn(NamedTuple):
    """Of a conversation, as the turns of all are counted."""

    conversation: int
    turn: int
    interval: int | None
    """Turns since its last one; None for its first."""
    end: Digest
    """Of the last block with which its next turn begins, whatever becomes of the answer."""


class Conversations:
    """Of one pool; does nothing where its policy is no `KeepsConversations`."""

    __slots__ = ("_ends", "_kept", "_pool", "_turn")

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._turn = 0
        # of turns, by the last block with which the next one begins: their number, and their conversation, until a turn
        # goes on from there
        self._ends: OrderedDict[Digest, tuple[int, int | None]] = OrderedDict()
        self._kept: dict[str, OrderedDict[int, int]] = {}  # last turns by conversation, by owner, longest ago first

    def ended(self, sequence: BlockSequence, *, prompt_tokens: int | None = None) -> EndedTurn | None:
        """A sequence is about to give its blocks back; None if it leaves nothing that a turn could go on from.

        `prompt_tokens`: of its tokens, those that its next turn has, but for the last `TAIL_TOKENS`; by default all.
        """
        num_sealed = sequence.num_sealed_blocks
        if not num_sealed or not self._pool.keeps_conversations:
            return None
        digests = sequence.prefix_digests()
        place = last = num_sealed - 1
        if prompt_tokens is not None:
            place = min(place, max(0, (prompt_tokens - TAIL_TOKENS) // sequence.block_size_tokens - 1))
            last = place - 1  # a prompt that comes again goes on from nothing
        before, conversation = self._go_on(digests, last)
        self._turn += 1
        if conversation is None:
            conversation = self._turn
        end = digests[place]
        self._ends[end] = self._turn, conversation
        self._ends.move_to_end(end)
        if len(self._ends) > MAX_ENDS:
            self._ends.popitem(last=False)
        if before is not None:
            self._went_on(sequence, before, conversation)
        return EndedTurn(conversation, self._turn, None if before is None else self._turn - before, end)

    def clear(self) -> None:
        self._ends.clear()
        for conversations in self._kept.values():
            for conversation in conversations:
                self._pool.drop_conversation(conversation)
        self._kept.clear()

    def _go_on(self, digests: Sequence[Digest], last: int) -> tuple[int | None, int | None]:
        """The latest turn that these up to `last` begin with, and its conversation; none for a second one to go on from
        there.
        """
        ends = self._ends
        for place in range(last, -1, -1):
            found = ends.get(digests[place])
            if found is not None:
                ends[digests[place]] = found[0], None
                return found
        return None, None

    def _went_on(self, sequence: BlockSequence, before: int, conversation: int) -> None:
        """It is kept, as far as there is room, or one that did not go on since its last turn gives it room."""
        pool, kept = self._pool, self._kept.setdefault(sequence.owner, OrderedDict())
        kept.pop(conversation, None)
        blocks = sequence.sealed_heads()
        share = pool.share_blocks()
        room = self._room(kept, int(KEPT_SHARE * share))
        while kept and room < len(blocks) and next(iter(kept.values())) < before:
            oldest, _ = kept.popitem(last=False)
            room += pool.kept_blocks(oldest)
            pool.drop_conversation(oldest)
        if room < len(blocks):
            pool.drop_conversation(conversation)  # of which it may keep less now
        if min(room, len(blocks)) >= LEAST_SHARE * share:
            heads, interval = blocks[:room], self._turn - before
            pool.keep_conversation(heads, conversation, turn=self._turn, interval=interval)
            if pool.kept_blocks(conversation) > len(heads):  # of answers that came back otherwise, too
                pool.drop_conversation(conversation)
                pool.keep_conversation(heads, conversation, turn=self._turn, interval=interval)
            kept[conversation] = self._turn
        else:
            pool.drop_conversation(conversation)
        if not kept:
            del self._kept[sequence.owner]

    def _room(self, kept: OrderedDict[int, int], most_blocks: int) -> int:
        """What is left for one more of an owner's; forgets those of which all was given up."""
        counts = {conversation: self._pool.kept_blocks(conversation) for conversation in kept}
        for conversation in [conversation for conversation, count in counts.items() if not count]:
            self._pool.drop_conversation(conversation)
            del kept[conversation]
        return most_blocks - sum(counts.values())
