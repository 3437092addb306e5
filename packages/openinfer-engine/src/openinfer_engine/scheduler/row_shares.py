"""`RowShares`: what runs, divided between tenants: sequence slots and KV blocks in use.

A tenant's share of either is by its weight, over those that have something running or waiting. One may hold more while
no other waits that holds less than its share. From then on

- requests of one that holds its share are not admitted or resumed (it is *full*),
- the youngest request of the one that is furthest beyond gives way to the one that waits, if that stays within its
  share: so what gave way is not beyond its share afterwards, nor is who came in, and neither gives way to the other.

Who gives way has generated some tokens since it began or resumed, so that each goes on, and the oldest of all that run
never does.

What a tenant held within its share in the last steps, and holds no more, is kept for a while (`RECENT_STEPS`) from
those that hold their share: a client's next request, which comes a moment after the one before has ended, would find
that taken, and would have to wait until others have given way once more.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as ListLike
from collections.abc import Set as AbstractSet

from openinfer_engine.scheduler.sequence import Sequence
from openinfer_kv_cache import BlockPool

LEAST_PROGRESS_TOKENS = 16
"""Tokens that a request has generated since it began or resumed before it gives way to another tenant's,"""
PROGRESS_PER_GIVEN_TOKEN = 1 / 64
"""and more of them, the more there would be to compute again."""

RECENT_STEPS = 64
"""Steps after which what a tenant held is forgotten; up to twice as many."""


class _Peaks:
    """What tenants held at most, of rows or blocks, in the last steps."""

    __slots__ = ("_before", "_now")

    def __init__(self) -> None:
        self._now: dict[str, int] = {}
        self._before: dict[str, int] = {}

    def note(self, tenant: str, amount: int) -> None:
        if amount > self._now.get(tenant, 0):
            self._now[tenant] = amount

    def turn(self) -> None:
        self._now, self._before = {}, self._now

    def tenants(self) -> AbstractSet[str]:
        return self._now.keys() | self._before.keys()

    def of(self, tenant: str) -> int:
        return max(self._now.get(tenant, 0), self._before.get(tenant, 0))


class RowShares:
    """Of one pool and its slots; `weight` is a tenant's share relative to others'."""

    def __init__(self, pool: BlockPool, *, num_slots: int, weight: Callable[[str], float]) -> None:
        self._pool = pool
        self._num_slots = num_slots
        self._weight = weight
        self.rows: Counter[str] = Counter()  # sequences with a slot, by tenant
        self._recent_rows, self._recent_blocks = _Peaks(), _Peaks()
        self._steps_noted = 0

    def enter(self, sequence: Sequence) -> None:
        """It takes a slot."""
        self.rows[sequence.request.tenant] += 1

    def leave(self, sequence: Sequence) -> None:
        """It runs and loads no longer."""
        tenant = sequence.request.tenant
        self.rows[tenant] -= 1
        if not self.rows[tenant]:
            del self.rows[tenant]

    def note_step(self) -> None:
        """Called once for each step, before anything is admitted to it."""
        self._steps_noted += 1
        if self._steps_noted % RECENT_STEPS == 0:
            self._recent_rows.turn()
            self._recent_blocks.turn()
        for tenant, num_rows in self.rows.items():
            self._recent_rows.note(tenant, num_rows)
            self._recent_blocks.note(tenant, self._pool.used_blocks(tenant))

    @property
    def recent_tenants(self) -> AbstractSet[str]:
        """Tenants that had something running in the last steps."""
        return self._recent_rows.tenants()

    def kept_from(self, sequence: Sequence, *, num_blocks: int) -> tuple[int, Mapping[str, int]]:
        """What a sequence leaves to others, which held it lately; none within its tenant's share.

        Returns:
            Slots, and blocks by tenant. What a tenant still has of these, idle, is among them.
        """
        tenant = sequence.request.tenant
        recent = self.recent_tenants
        if not self.rows[tenant] or not recent - {tenant}:
            return 0, {}  # where nothing of it runs, it may be the only one that goes on
        share = self._shares(recent | {tenant})
        if self._excess(tenant, share(tenant), more_rows=1, more_blocks=num_blocks) <= 0:
            return 0, {}
        slots, blocks = 0, dict[str, int]()
        for other in recent - {tenant}:
            part = share(other)
            slots += max(0, min(self._recent_rows.of(other), int(part * self._num_slots)) - self.rows[other])
            most_blocks = min(self._recent_blocks.of(other), int(part * self._pool.num_blocks))
            blocks[other] = max(0, most_blocks - self._pool.used_blocks(other))
        return slots, blocks

    def full(self, waiting: Mapping[str, int], preempted: Iterable[Sequence]) -> AbstractSet[str]:
        """Tenants that hold their share or more; none if no other tenant has something waiting."""
        wanting = {*waiting, *(sequence.request.tenant for sequence in preempted)}
        if not wanting or (len(wanting) == 1 and self.rows.keys() <= wanting):
            return frozenset()
        share = self._shares(wanting)
        full = {tenant for tenant in self.rows if self._excess(tenant, share(tenant), more_rows=1, more_blocks=1) > 0}
        return full if wanting - full else frozenset()

    def held(self, tenant: str) -> float:
        """The part of slots or blocks that a tenant has, whichever is larger, over its weight; 0 if nothing runs."""
        rows = self.rows[tenant]
        if not rows:  # blocks of its own that another tenant uses do not count: it could not give them back
            return 0.0
        part = max(rows / self._num_slots, self._pool.used_blocks(tenant) / self._pool.num_blocks)
        return part / self._weight(tenant)

    def victims(self, running: ListLike[Sequence], waiting: Iterable[str]) -> list[Sequence]:
        """The youngest first of the tenant furthest beyond its share, of those that run but the oldest; maybe none."""
        share = self._shares(waiting)
        excess = {tenant: self._excess(tenant, share(tenant)) for tenant in self.rows}
        worst = max(excess, key=lambda tenant: (excess[tenant], tenant), default=None)
        return [] if worst is None or excess[worst] <= 0 else _youngest_of(worst, running)

    def victims_for_prefixes(self, running: ListLike[Sequence]) -> list[Sequence]:
        """The same, of the tenant that is furthest beyond the share of the pool that prefixes are kept by."""
        worst = max(self.rows, key=lambda tenant: (self._pool.used_blocks(tenant), tenant), default=None)
        is_beyond = worst is not None and self._pool.used_blocks(worst) > self._pool.share_blocks()
        return _youngest_of(worst, running) if worst is not None and is_beyond else []

    @staticmethod
    def has_gone_on(sequence: Sequence) -> bool:
        """Whether it has generated enough to give way to one that waits."""
        least = LEAST_PROGRESS_TOKENS + PROGRESS_PER_GIVEN_TOKEN * sequence.given_tokens
        return sequence.known_tokens - sequence.given_tokens >= least

    def stays_within(self, sequence: Sequence, waiting: Iterable[str], *, num_blocks: int, num_rows: int = 1) -> bool:
        """Whether its tenant would hold no more than its share with it, or so many of its size."""
        tenant = sequence.request.tenant
        share = self._shares(waiting)(tenant)
        return self._excess(tenant, share, more_rows=num_rows, more_blocks=num_rows * num_blocks) <= 0

    def _shares(self, wanting: Iterable[str]) -> Callable[[str], float]:
        """What part of all a tenant's share is."""
        total = sum(self._weight(tenant) for tenant in {*self.rows, *wanting})
        return lambda tenant: self._weight(tenant) / total

    def _excess(self, tenant: str, share: float, *, more_rows: int = 0, more_blocks: int = 0) -> float:
        """How far a tenant is beyond its share of slots or blocks, whichever is more, as a part of all."""
        # one row at least is any tenant's share
        slots = max(1, int(share * self._num_slots))
        rows = (self.rows[tenant] + more_rows - slots) / self._num_slots
        used_blocks = self._pool.used_blocks(tenant) + more_blocks
        return max(rows, used_blocks / self._pool.num_blocks - share)


def _youngest_of(tenant: str, running: ListLike[Sequence]) -> list[Sequence]:
    """A tenant's that run, youngest first: neither the oldest of all, nor what ends with the step in flight."""
    return [
        sequence
        for sequence in reversed(running[1:])
        if sequence.request.tenant == tenant and sequence.computed_tokens != sequence.target_tokens
    ]
