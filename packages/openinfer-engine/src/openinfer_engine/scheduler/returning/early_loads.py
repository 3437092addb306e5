"""`EarlyLoads`: the KV of conversations that will go on soon comes from KV tiers into the pool before their turn does.

A tool runs between two turns, and the link to the host is idle meanwhile: what was given up for others can be back when
the next turn comes, which then costs what it would if nothing had been given up.

    a turn ends ──► expected ── it is the next one, and nothing waits or loads ──► coming, window after window
                       ▲                                                               │ all of it is there,
                       │                                                               ▼ or there is no more room
                       └── its next turn ends ──────── late ◄── it does not go on ──── kept, as conversations are
                                                         └──► given up as any other

When a conversation goes on is counted in turns of all, as its place in the order of eviction is (`conversations.py`):
one that went on after n turns is expected n turns after its last one. Room is what is free, what nothing keeps, and
what conversations keep that are expected later; what clients retain, and what other tenants' shares protect, is none.

Two windows are under way at a time: the end of one is seen after a step, or by a loop that looks once in a while, and
the link would rest from its end to the next one's beginning, a third of the time where windows take 20 ms.

It is a guess, so nothing waits for it, but the turn whose own blocks are on their way, for `MOST_WAITED_S`: it would
load them a second time, and where the link is short of time, its next turns would come too soon for that. What is under
way is cancelled where blocks are short for a request, and none begins while one waits, loads, or is about to have the
first token of a turn that was found in the cache. Where guesses are wrong more often than right, few are made
(`_Record`).
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from openinfer_kv_cache import BlockSequence, Digest, EarlyFill, EndedTurn, KvCache, TierPort

MAX_WINDOW_BLOCKS = 512
WINDOW_SHARE = 16
"""Of the pool, one block in so many is a window at most, and as many stay free of them."""
MAX_WINDOWS = 2
"""Under way, so that the link has one while the end of another is not seen yet."""
MOST_WAITED_S = 0.1
"""For windows that bring what a request needs, which take half as long over a bus."""
MAX_CONVERSATIONS = 1024
MAX_DIGESTS = 2**18
"""Of all that are expected; those whose last turn ended longest ago are forgotten."""
PROBES = 8
"""While guesses are more often wrong, one turn in so many is followed by one."""


@dataclass(slots=True, eq=False)
class _Expected:
    """A conversation that went on once at least, from the end of a turn to that of its next one."""

    conversation: int
    owner: str
    digests: Sequence[Digest]
    end: Digest
    """`EndedTurn.end`, by which its next turn is known."""
    turn: int
    interval: int
    num_kept: int = 0
    """Blocks of its beginning that were seen to be in the pool since its last turn, and are kept."""
    num_brought: int = 0
    """Blocks that came since its last turn, until they are used or given up."""
    brought_end: int = 0
    """Where among its digests the last of these is followed by what did not come."""
    is_in_order: bool = True
    """Its blocks are given up tail first."""
    has_failed: bool = False
    """Tiers have no more of it, or lost it on the way: nothing is tried again before its next turn."""
    has_gone_on: bool = False
    """Its next turn runs."""
    awaited_since_s: float | None = None
    """When its next turn was first held back, if it was."""

    @property
    def due(self) -> int:
        return self.turn + self.interval

    def is_late(self, turn: int) -> bool:
        """Whether it should have gone on long ago."""
        return not self.has_gone_on and turn - self.due > self.interval


@dataclass(frozen=True, slots=True, eq=False)
class _Window:
    """Blocks of one conversation on their way."""

    fill: EarlyFill
    expected: _Expected
    begin: int
    """Where among its digests the first one is."""
    digests: Sequence[Digest]


class _Record:
    """How guesses went: each that was right counts up, each that was wrong down.

    One that is right when few are made lifts that: those few are made while the link brings what turns need that were
    not guessed, so that a conversation seldom comes as a whole, and the next ones would be late for the same reason.
    """

    def __init__(self) -> None:
        self._credit = self._most = 4
        self._turns = 0

    def turn_ended(self) -> None:
        self._turns += 1

    def note(self, *, was_right: bool) -> None:
        credit = max(self._credit, -1) + 1 if was_right else self._credit - 1
        self._credit = max(-self._most, min(self._most, credit))

    @property
    def allows(self) -> bool:
        return self._credit >= 0 or self._turns % PROBES == 0


class EarlyLoads:
    """Of one scheduler whose models have one block table."""

    def __init__(self, kv: KvCache, port: TierPort) -> None:
        self._kv = kv
        self._port = port
        self._window_blocks = max(1, min(MAX_WINDOW_BLOCKS, kv.pool.num_blocks // WINDOW_SHARE))
        self._expected: OrderedDict[int, _Expected] = OrderedDict()  # by conversation, longest ago first
        self._by_end: dict[Digest, _Expected] = {}
        self._num_digests = 0
        self._turn = 0
        self._windows = deque[_Window]()  # the order in which they began
        self._coming: set[Digest] = set()  # of all of these
        self._has_work = False
        self._record = _Record()
        self.loaded_blocks = 0
        self.unused_blocks = 0
        """Of these, given up before a turn used them."""

    @property
    def num_filling(self) -> int:
        """Blocks on their way: they come back soon, whatever becomes of them."""
        return sum(window.fill.num_blocks for window in self._windows)

    def holds_back(self, sequence: BlockSequence, *, now_s: float) -> bool:
        """Whether a request that could begin waits, since blocks that it needs are on their way."""
        if not self._windows:
            return False
        digests = sequence.prefix_digests()
        for window in self._windows:
            if window.begin < len(digests) and digests[window.begin] == window.digests[0]:
                expected = window.expected
                if expected.awaited_since_s is None:
                    expected.awaited_since_s = now_s
                return now_s - expected.awaited_since_s < MOST_WAITED_S
        return False

    def begun(self, sequence: BlockSequence) -> None:
        """A request has blocks, of which those that were in the pool are sealed: it may be a turn that was expected."""
        digests = sequence.prefix_digests() if self._expected else ()
        found = next((self._by_end[each] for each in reversed(digests) if each in self._by_end), None)
        if found is None or found.has_gone_on:
            return
        found.has_gone_on = True
        for window in self._windows:
            if window.expected is found:
                window.fill.cancel()  # the turn loads for itself what has not come
        if found.num_brought:
            # What came is judged, be it a part of the conversation: its turn may have come too soon for the rest.
            self._judge(found, was_right=sequence.num_sealed_blocks >= found.brought_end - found.num_brought // 2)

    def ended(self, sequence: BlockSequence, turn: EndedTurn) -> None:
        """A turn has ended; its sequence is about to give its blocks back."""
        self._turn = turn.turn
        self._record.turn_ended()
        self._has_work = True
        self._forget(turn.conversation)
        if turn.interval is not None:
            digests = sequence.prefix_digests()[: sequence.num_sealed_blocks]
            expected = _Expected(turn.conversation, sequence.owner, digests, turn.end, turn.turn, turn.interval)
            self._expected[turn.conversation] = self._by_end[turn.end] = expected
            self._num_digests += len(digests)
        while len(self._expected) > MAX_CONVERSATIONS or self._num_digests > MAX_DIGESTS:
            self._forget(next(iter(self._expected)))

    def advance(self, *, is_busy: bool) -> None:
        """Goes on with what is expected next; after a plan, or when the last request has ended.

        Args:
            is_busy: requests wait, or load what they need now, or a cached turn is about to have its first token.
        """
        self.settle()
        if is_busy or not self._has_work or len(self._windows) == MAX_WINDOWS:
            return
        self._has_work = False
        self._give_up_late()
        if self._record.allows:
            self._begin_windows()

    def settle(self) -> None:
        """Takes windows that are over into the pool, in the order in which they began: a tail is nothing before it."""
        while self._windows and self._windows[0].fill.is_over():
            self._take(self._windows.popleft())

    def _take(self, window: _Window) -> None:
        fill, coming = window.fill, window.expected
        is_expected = self._expected.get(coming.conversation) is coming  # its next turn has not ended meanwhile
        is_kept = is_expected and not coming.has_failed  # behind a gap nothing is found
        num_blocks = fill.finish(lambda blocks: self._keep(coming, blocks) if is_kept else None)
        self._coming.difference_update(window.digests)
        coming.num_brought += num_blocks
        if not coming.has_failed:
            coming.brought_end = window.begin + num_blocks
        coming.is_in_order &= not num_blocks
        coming.has_failed |= num_blocks < fill.num_blocks
        self.loaded_blocks += num_blocks
        self._has_work = True
        if num_blocks < fill.num_blocks:
            self._give_up_tail_first(coming)

    def give_way(self) -> bool:
        """Blocks are short for a request: cancels the windows under way; whether there were any."""
        for window in self._windows:
            window.fill.cancel()
        return bool(self._windows)

    def clear(self) -> None:
        """All content was voided."""
        self.give_way()
        self._expected.clear()
        self._by_end.clear()
        self._num_digests = 0

    def _begin_windows(self) -> None:
        """As many as may be under way, of those that are expected next."""
        for expected in sorted(self._expected.values(), key=_due):
            while not (expected.has_gone_on or expected.has_failed):
                num_windows = len(self._windows)
                if self._go_on(expected):
                    break
                if len(self._windows) in {num_windows, MAX_WINDOWS}:
                    return

    def _go_on(self, expected: _Expected) -> bool:
        """Sees to one; whether all that there is has come or comes, so that those expected later may have the rest."""
        pool = self._kv.pool
        if not pool.kept_blocks(expected.conversation):
            expected.num_kept = 0  # it lost its place to another conversation, or all of it was given up
        if expected.num_kept == len(expected.digests) and pool.find(expected.digests[-1]) is not None:
            return True  # of what is kept the tail is given up first
        # What is kept is given up at one end, so what lies between two blocks that are there is there, too.
        known = expected.digests[: expected.num_kept]
        is_known = bool(known) and None not in (pool.find(known[0]), pool.find(known[-1]))
        begin = len(known) if is_known else 0
        found = pool.find_prefix(expected.digests[begin:])
        num_found = begin + len(found)
        if new := found[max(0, expected.num_kept - begin) :]:
            pool.acquire(new)
            self._keep(expected, new)
            pool.release(new[::-1])
        expected.num_kept = num_found
        # What is on its way follows, and what comes after a gap may be there still.
        follows = expected.digests[num_found : num_found + MAX_WINDOWS * self._window_blocks]
        begin = num_found + sum(1 for _ in takewhile(self._coming.__contains__, follows))
        window = expected.digests[begin : begin + self._window_blocks]
        lacking = list(takewhile(self._is_lacking, window))
        num_blocks = min(len(lacking), self._make_room(expected)) if lacking else 0
        if num_blocks <= 0:
            self._give_up_tail_first(expected)
            return not lacking
        fill = EarlyFill.begin(self._kv, self._port, lacking[:num_blocks], owner=expected.owner)
        if fill is None:
            expected.has_failed = True
            return True
        digests = lacking[: fill.num_blocks]
        self._windows.append(_Window(fill, expected, begin, digests))
        self._coming.update(digests)
        return False

    def _is_lacking(self, digest: Digest) -> bool:
        return digest not in self._coming and self._kv.pool.find(digest) is None

    def _give_up_tail_first(self, expected: _Expected) -> None:
        """Windows came head first, and what has been idle longest is given up first: without its head all is lost."""
        if not expected.is_in_order:
            pool = self._kv.pool
            blocks = pool.find_prefix(expected.digests)
            pool.acquire(blocks)
            pool.release(blocks[::-1])
            expected.is_in_order = True

    def _make_room(self, expected: _Expected) -> int:
        """Blocks that one may take; conversations that are expected later keep theirs no longer for them."""
        for other in sorted(self._expected.values(), key=_due, reverse=True):
            if self._room(expected.owner) >= self._window_blocks or other.due <= expected.due:
                break
            if other.owner == expected.owner and not other.has_gone_on:
                self._drop(other)
        return self._room(expected.owner)

    def _room(self, owner: str) -> int:
        """Without what any conversation keeps, and without what may be short for those that run."""
        pool = self._kv.pool
        others = pool.protected_blocks(owner) + pool.kept_idle_blocks + pool.retained_blocks
        return pool.available_blocks - others - self._window_blocks

    def _keep(self, expected: _Expected, blocks: Sequence[int]) -> None:
        conversation = expected.conversation
        self._kv.pool.keep_conversation(blocks, conversation, turn=expected.turn, interval=expected.interval)

    def _drop(self, expected: _Expected) -> None:
        self._kv.pool.drop_conversation(expected.conversation)
        expected.num_kept = 0
        if expected.num_brought:
            self._judge(expected, was_right=False)

    def _give_up_late(self) -> None:
        for each in [each for each in self._expected.values() if each.is_late(self._turn)]:
            self._drop(each)
            self._forget(each.conversation)

    def _judge(self, expected: _Expected, *, was_right: bool) -> None:
        self._record.note(was_right=was_right)
        if not was_right:
            self.unused_blocks += expected.num_brought
        expected.num_brought = 0

    def _forget(self, conversation: int) -> None:
        expected = self._expected.pop(conversation, None)
        if expected is not None:
            self._num_digests -= len(expected.digests)
            if self._by_end.get(expected.end) is expected:
                del self._by_end[expected.end]


def _due(expected: _Expected) -> int:
    return expected.due
