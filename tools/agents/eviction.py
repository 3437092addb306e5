"""Which order of eviction finds most of agents' sessions: the real block pool under arrivals that are drawn, no model.

    python tools/agents/eviction.py OUT.json [WORKLOAD ...]

A turn arrives, takes what is cached, has the rest loaded from a host tier that keeps everything, one turn after the
other (LOAD_S a block), computes what is new (COMPUTE_S a block), and ends; its session goes on after a wait. A turn for
which there are no blocks waits for one to end. Times are those of Qwen3-8B on a card whose host tier gives 50 GB/s.

    lru      least recently used
    kept     the pool's own order: conversations that go on are kept whole (openinfer_kv_cache.eviction.conversations)
    apart    the same, and as the engine admits: while one loads, what is kept makes no room for another load
    optimal  Belady's, for the order of arrivals that `lru` had: the block that is needed last goes. No order finds more
"""

import heapq
import json
import random
import statistics
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from openinfer_core.provenance import provenance
from openinfer_kv_cache import BlockSequence, KvCache, KvCacheOptions, LeastRecentlyUsed

LOAD_S, COMPUTE_S, TURN_S, DECODE_S = 47e-6, 400e-6, 0.03, 0.1
BLOCK = 1
"""A token stands for a block of them."""


@dataclass(frozen=True, slots=True)
class Times:
    """What a card takes; `load_s` and `compute_s` for each block."""

    load_s: float = LOAD_S
    compute_s: float = COMPUTE_S
    turn_s: float = TURN_S
    decode_s: float = DECODE_S
    one_after_the_other: bool = False
    """Whether prompts of two turns are computed one after the other, as one card has to."""
    by_layer: bool = False
    """Whether a turn is computed while its load is under way, layer by layer, which this engine does not."""


@dataclass(frozen=True, slots=True)
class Turn:
    """The ids of a prompt and its answer; `wait_s` after the turn before it."""

    ids: Sequence[int]
    wait_s: float


@dataclass(frozen=True, slots=True)
class Workload:
    """Sessions, each with the second at which it begins."""

    num_blocks: int
    sessions: Sequence[tuple[float, Sequence[Turn]]]


def conversation(
    ids: Iterator[int], *, first: int, new: int, turns: int, wait: Callable[[], float], shared: Sequence[int] = ()
) -> list[Turn]:
    held = [*shared, *(next(ids) for _ in range(first))]
    found = [Turn(tuple(held), 0.0)]
    for _ in range(turns - 1):
        held += [next(ids) for _ in range(new)]
        found.append(Turn(tuple(held), wait()))
    return found


def make_ids() -> Iterator[int]:
    number = 0
    while True:
        number += 1
        yield number


def cycle(
    sessions: int, blocks: int, pool: int, *, wait_s: float, spread: float, turns: int = 30, new: int = 10
) -> Workload:
    """Sessions as long as one another; waits from one length (spread 0) to exponential ones (1)."""
    ids, draw = make_ids(), random.Random(1)

    def wait() -> float:
        return wait_s * (1 - spread) + (draw.expovariate(1 / wait_s) * spread if spread else 0.0)

    made = [conversation(ids, first=blocks, new=new, turns=turns, wait=wait) for _ in range(sessions)]
    return Workload(pool, [(0.01 * n, turns) for n, turns in enumerate(made)])


def come_and_go(*, sessions: int, pool: int, every_s: float) -> Workload:
    """Sessions of 1 to 40 turns that begin one after the other, some with quick tools and some with people who read."""
    ids, draw = make_ids(), random.Random(2)
    made: list[tuple[float, Sequence[Turn]]] = []
    for number in range(sessions):
        mean_s = draw.choice((1.0, 5.0, 60.0))
        turns = conversation(
            ids,
            first=draw.randrange(100, 1500),
            new=draw.randrange(5, 60),
            turns=draw.randrange(1, 41),
            wait=lambda mean_s=mean_s: draw.expovariate(1 / mean_s),
        )
        made.append((number * every_s, turns))
    return Workload(pool, made)


def once(workload: Workload, *, prompts: int, blocks: int, every_s: float, shared: int) -> Workload:
    """A workload next to prompts that come once and share their beginning."""
    ids = iter(range(10**7, 10**9))
    common = [next(ids) for _ in range(shared)]
    made = [[Turn((*common, *(next(ids) for _ in range(blocks))), 0.0)] for _ in range(prompts)]
    return Workload(workload.num_blocks, [*workload.sessions, *((n * every_s, turns) for n, turns in enumerate(made))])


WORKLOADS: Mapping[str, Callable[[], Workload]] = {
    "six of 2,400 blocks, pool a third, equal waits": lambda: cycle(6, 2400, 5100, wait_s=0.5, spread=0.0),
    "six, waits of 2 s": lambda: cycle(6, 2400, 5100, wait_s=2.0, spread=0.0),
    "six, exponential waits": lambda: cycle(6, 2400, 5100, wait_s=2.0, spread=1.0),
    "sixteen of 1,900, pool a third, equal waits": lambda: cycle(16, 1900, 11000, wait_s=1.0, spread=0.0),
    "sixteen, half exponential waits": lambda: cycle(16, 1900, 11000, wait_s=4.0, spread=0.5),
    "sixteen, exponential waits": lambda: cycle(16, 1900, 11000, wait_s=4.0, spread=1.0),
    "sixteen, pool nine tenths": lambda: cycle(16, 1900, 29000, wait_s=4.0, spread=0.5),
    "sixteen, pool holds all": lambda: cycle(16, 1900, 36000, wait_s=4.0, spread=0.5),
    "sessions come and go": lambda: come_and_go(sessions=150, pool=8000, every_s=3.0),
    "sessions come and go, small pool": lambda: come_and_go(sessions=150, pool=4000, every_s=3.0),
    "sixteen next to prompts that come once": lambda: once(
        cycle(16, 1900, 11000, wait_s=4.0, spread=0.5), prompts=400, blocks=100, every_s=0.25, shared=100
    ),
    "come and go next to prompts that come once": lambda: once(
        come_and_go(sessions=100, pool=8000, every_s=3.0), prompts=1000, blocks=200, every_s=0.4, shared=300
    ),
}


@dataclass
class Result:
    """Of one order of eviction."""

    hits: int = 0
    asked: int = 0
    """Blocks that were computed before."""
    ttft_s: list[float] = field(default_factory=list[float])
    turns: list[int] = field(default_factory=list[int])
    """Of which turn each is, from 0."""
    order: list[Sequence[int]] = field(default_factory=list[Sequence[int]])

    def told(self) -> dict[str, float]:
        cuts = statistics.quantiles(self.ttft_s, n=100)
        return {
            "hits": round(self.hits / max(1, self.asked), 3),
            "ttft_p50_ms": round(1e3 * cuts[49], 1),
            "ttft_p90_ms": round(1e3 * cuts[89], 1),
            "ttft_p99_ms": round(1e3 * cuts[98], 1),
        }


class Play:
    """One workload in one cache, by events: a turn arrives, a load has ended, a turn ends."""

    def __init__(
        self, workload: Workload, cache: KvCache, *, waits_for_loads: bool, times: Times | None = None
    ) -> None:
        self._workload, self._cache, self._waits_for_loads = workload, cache, waits_for_loads
        self._times = times or Times()
        self._computes_until_s = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._waiting: deque[tuple[float, int, int]] = deque()
        self._known: set[int] = set()
        self._loads_until_s = self._now_s = 0.0
        self._num_events = 0
        self.found = Result()

    def run(self) -> Result:
        for number, (at_s, _) in enumerate(self._workload.sessions):
            self._at(at_s, self._arrive, number, 0)
        while self._events:
            self._now_s, _, event, values = heapq.heappop(self._events)
            event(*values)
            while self._waiting and self._begin(*self._waiting[0]):
                self._waiting.popleft()
        return self.found

    def _at(self, at_s: float, event: Callable[..., None], *values: Any) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (at_s, self._num_events, event, values))

    def _arrive(self, number: int, turn: int) -> None:
        self._waiting.append((self._now_s, number, turn))

    def _loaded(self) -> None:
        """Those that wait are looked at again."""

    def _end(self, sequence: BlockSequence, number: int, turn: int) -> None:
        self._cache.conversations.ended(sequence)
        sequence.release()
        turns = self._workload.sessions[number][1]
        if turn + 1 < len(turns):
            self._at(self._now_s + turns[turn + 1].wait_s, self._arrive, number, turn + 1)

    def _begin(self, arrived_s: float, number: int, turn: int) -> bool:
        ids = self._workload.sessions[number][1][turn].ids
        sequence = self._cache.sequence((*ids, 0))
        old = sum(each in self._known for each in ids)
        if not sequence.would_fit(len(ids), spare_blocks=self._spare_blocks(sequence, old)):
            sequence.release()
            return False
        hits = min(sequence.match(), old)
        sequence.reserve(len(ids))
        sequence.seal(len(ids))
        self._known.update(ids)
        found = self.found
        found.hits, found.asked = found.hits + hits, found.asked + old
        found.order.append(ids)
        if hits < old:
            self._loads_until_s = max(self._loads_until_s, self._now_s) + (old - hits) * self._times.load_s
            self._at(self._loads_until_s, self._loaded)
        first_s = self._first_s(self._loads_until_s if hits < old else self._now_s, new=len(ids) - old)
        found.ttft_s.append(first_s - arrived_s)
        found.turns.append(turn)
        self._at(first_s + self._times.decode_s, self._end, sequence, number, turn)
        return True

    def _first_s(self, loaded_s: float, *, new: int) -> float:
        """When a turn whose prefix is there at `loaded_s` has its first token."""
        times = self._times
        computes_s = times.turn_s + new * times.compute_s
        begin_s = self._now_s if times.by_layer else loaded_s
        if times.one_after_the_other:
            begin_s = max(begin_s, self._computes_until_s)
            self._computes_until_s = begin_s + computes_s
        return max(begin_s + computes_s, loaded_s)

    def _spare_blocks(self, sequence: BlockSequence, old: int) -> int:
        """As `BlockAllocator` has it: while another loads, what conversations keep makes no room for a load."""
        if not self._waits_for_loads or self._loads_until_s <= self._now_s:
            return 0
        cached = sequence.count_cached_tokens()
        return max(0, self._cache.pool.kept_idle_blocks - cached) if cached < old else 0


class Optimal:
    """The share of known blocks that are found if what is needed last goes, turn after turn, none at the same time."""

    def __init__(self, order: Sequence[Sequence[int]]) -> None:
        self._order = order
        self._uses: dict[int, list[int]] = defaultdict(list)
        for at, ids in reversed(list(enumerate(order))):
            for each in ids:
                self._uses[each].append(at)
        self._held: set[int] = set()
        self._heap: list[tuple[int, int, int]] = []

    def hits(self, num_blocks: int) -> float:
        hits, asked, known = 0, 0, set[int]()
        for ids in self._order:
            old = [each for each in ids if each in known]
            hits, asked = hits + sum(each in self._held for each in old), asked + len(old)
            known.update(ids)
            self._held.update(ids)
            for depth, each in enumerate(ids):
                self._uses[each].pop()
                heapq.heappush(self._heap, (-self._next_use(each), -depth, each))
            self._evict(set(ids), num_blocks)
        return round(hits / max(1, asked), 3)

    def _next_use(self, block: int) -> int:
        return self._uses[block][-1] if self._uses[block] else len(self._order) + 1

    def _evict(self, in_use: set[int], num_blocks: int) -> None:
        passed: list[tuple[int, int, int]] = []
        while len(self._held) > num_blocks:
            entry = heapq.heappop(self._heap)
            block = entry[2]
            if block in in_use:
                passed.append(entry)
            elif -entry[0] == self._next_use(block):
                self._held.discard(block)
        for entry in passed:
            heapq.heappush(self._heap, entry)


def main() -> int:
    out, *names = sys.argv[1:]
    rows: dict[str, Any] = {}
    for name in names or WORKLOADS:
        workload = WORKLOADS[name]()
        options = KvCacheOptions(num_blocks=workload.num_blocks, block_size_tokens=BLOCK)
        lru = Play(workload, KvCache(options, policy=LeastRecentlyUsed()), waits_for_loads=False).run()
        kept = Play(workload, KvCache(options), waits_for_loads=False).run()
        apart = Play(workload, KvCache(options), waits_for_loads=True).run()
        optimal = {"hits": Optimal(lru.order).hits(workload.num_blocks)}
        rows[name] = {"lru": lru.told(), "kept": kept.told(), "apart": apart.told(), "optimal": optimal}
        print(name, *(f"\n   {order:8} {told}" for order, told in rows[name].items()), flush=True)
    report = {**msgspec.to_builtins(provenance()), "rows": rows}
    Path(out).write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
