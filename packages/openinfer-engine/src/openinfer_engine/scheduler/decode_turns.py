"""`DecodeTurns`: which decode rows of a tenant have a step, where more of them would make another tenant's rows slow.

    time of a step  =  time without a row  +  rows x time per row  +  tokens of their contexts x time per token

What the decode rows of one tenant may add to a step next to decode rows of others has a bound: `ROWS_MS`, a third of
what the step would take without them, or as long as the others' rows take, whichever is most. Where they add more, they
take turns in order of age, so each goes on and none falls behind; what sits a step out keeps its slot and blocks. Rows
that take no longer than those of the others are within the bound. One next to prompts of others alone has none: these
may take as long as its rows do (`itl_limit.py`). More than a third is too much: where the first rows cost most, or
where what a tenant does elsewhere slows the processor, a step without them is taken for longer than it is.

Next to prompts of their own tenant that are under way rows leave room for the least that these have of a step, up to
half of the bound. Otherwise one that has more than its blocks hold, of which something is always computed again, has
the bound twice in each step.

Those whose last row was less than `RECENT_STEPS` ago count as if they had one: the next request of a client that ends
one and asks again would wait for two steps of all rows of the other, the second of them its own.

A turn is `TURN_STEPS` long, so that those that have it soon have gone on far enough to give way to a newcomer
(`row_shares.py`). Where half of the rows have a step, turns are one step long: then none waits for two.

The times follow what steps took, by a plane through the last ones, each of which counts a little less than the one
after (least squares with exponential forgetting: Haykin, Adaptive Filter Theory, chapter 10). A row of a long context
reads more of the KV memory: on a CPU sixteen of 1,500 tokens took as long as a hundred of 20. Where the last steps were
about alike, what was learnt before stands (a ridge around it: Hoerl and Kennard, Technometrics 12(1), 1970), and at
first all time is taken for the rows': then a row is never cheaper than it seems.
"""

import math
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as ListLike
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from openinfer_engine.scheduler.itl_limit import OTHERS_MS
from openinfer_engine.scheduler.sequence import Sequence
from openinfer_engine.scheduler.step_builder import StepInFlight

LEAST_ROWS = 4
TURN_STEPS = 16
RECENT_STEPS = 16
ROWS_MS = 5.0
_PART = 1 / 3  # of what a step takes without a tenant, that this one may add
_ROWS_PART = 0.5  # of what a tenant may add, that its rows have next to prompts of its own
_KEPT = 0.95  # of the weight of earlier steps with each newer one
_LEAST_SPREAD = 0.1  # of the mean: with less, what is known counts for more than a plane through the last steps
_LEAST_KEPT = 0.5  # of what is known: the last steps say less only by chance, as where one with few rows took long
_LEARNT = 0.05  # of what the last steps say beyond what is known, with each step
_MOST_GROWTH = 2.0  # a step counts as at most so many times the mean: the host was busy with something else


class _Turn:
    """Of one tenant's rows."""

    __slots__ = ("_first", "_left")

    def __init__(self) -> None:
        self._first = -1  # age of the first row that has it, or of where that would be
        self._left = TURN_STEPS

    def others(self, rows: ListLike[Sequence], costs_ms: Mapping[Sequence, float], room_ms: float) -> list[Sequence]:
        """All of these, oldest first, but those that there is room for; called once a step, where not all have it."""
        first = next((place for place, sequence in enumerate(rows) if sequence.admission >= self._first), 0)
        in_order = [*rows[first:], *rows[:first]]
        most, used_ms = 0, 0.0
        for sequence in in_order:
            used_ms += costs_ms[sequence]
            if used_ms > room_ms and most >= LEAST_ROWS:
                break
            most += 1
        self._left -= 1
        if most < len(rows) and (self._left <= 0 or len(rows) <= 2 * most):
            self._first, self._left = in_order[most].admission, TURN_STEPS
        return in_order[most:]


@dataclass(frozen=True, slots=True)
class _Fit:
    """What a step takes, in ms."""

    base_ms: float
    row_ms: float
    token_ms: float

    def of(self, sequence: Sequence) -> float:
        return self.row_ms + self.token_ms * sequence.computed_tokens

    def of_step(self, rows: int, tokens: int) -> float:
        return self.base_ms + self.row_ms * rows + self.token_ms * tokens

    def room_ms(self, least_ms: float, *, others_ms: float) -> float:
        """What a tenant may add to a step in which rows of others take so long."""
        return max(least_ms, others_ms, _PART * (self.base_ms + others_ms))


class DecodeTurns:
    """Of one scheduler."""

    __slots__ = ("_applied_s", "_fitted", "_known", "_recent", "_sums", "_turns", "_weight")

    def __init__(self) -> None:
        self._turns: dict[str, _Turn] = {}  # by tenant
        self._recent: dict[str, int] = {}  # steps for which a tenant still counts as one with rows
        self._applied_s = float("-inf")
        self._weight = 0.0  # of all steps
        self._sums = [0.0] * 8  # of rows, tokens, ms; squares of rows and tokens; products of each two
        self._fitted: _Fit | None = None
        self._known: tuple[float, float] | None = None  # time per row and per token, of longer ago

    def sitting_out(
        self, ready: Iterable[Sequence], decoding: Iterable[Sequence], prompts_ms: Mapping[str, float]
    ) -> frozenset[Sequence]:
        """Those without a row in the next step.

        Args:
            ready: sequences that may decode, oldest first.
            decoding: all that decode, those without a mask for the next step among them.
            prompts_ms: what prompts of a tenant will take of the step at least.
        """
        fit = self._fit()
        costs_ms = {sequence: 0.0 if fit is None else fit.of(sequence) for sequence in decoding}
        by_tenant = _sums_by_tenant(costs_ms)
        for tenant in self._turns.keys() - by_tenant.keys():
            del self._turns[tenant]
        rows: dict[str, list[Sequence]] = {}
        for sequence in ready:
            rows.setdefault(sequence.request.tenant, []).append(sequence)
        left = {tenant: steps - 1 for tenant, steps in self._recent.items() if steps > 1}
        self._recent = left | dict.fromkeys(rows, RECENT_STEPS)
        if fit is None or len(by_tenant.keys() | self._recent.keys()) < 2:
            return frozenset()
        total_ms = sum(by_tenant.values())
        sitting: set[Sequence] = set()
        for tenant, own in rows.items():
            room_ms = fit.room_ms(ROWS_MS, others_ms=total_ms - by_tenant[tenant])
            room_ms = max(_ROWS_PART * room_ms, room_ms - prompts_ms.get(tenant, 0.0))
            if len(own) > LEAST_ROWS and sum(costs_ms[each] for each in own) > room_ms * (1 + 1e-9):
                sitting.update(self._turns.setdefault(tenant, _Turn()).others(own, costs_ms, room_ms))
        return frozenset(sitting)

    @property
    def recent_tenants(self) -> AbstractSet[str]:
        """Tenants that count as having decode rows, as far as `sitting_out` was asked."""
        return self._recent.keys()

    def left_ms(self, rows: Iterable[Sequence], tenants: Iterable[str]) -> float:
        """Of what one of some tenants may add to a step next to rows of others, the most that its own rows leave."""
        fit = self._fit()
        if fit is None:
            return OTHERS_MS
        by_tenant = _sums_by_tenant({sequence: fit.of(sequence) for sequence in rows})
        total_ms = sum(by_tenant.values())
        left_ms = -math.inf
        for tenant in tenants:
            own_ms = by_tenant.get(tenant, 0.0)
            has_others = len(by_tenant) > (tenant in by_tenant)
            room_ms = fit.room_ms(OTHERS_MS, others_ms=total_ms - own_ms) - own_ms if has_others else OTHERS_MS
            left_ms = max(left_ms, room_ms)
        return left_ms

    def note(self, step: StepInFlight, *, applied_s: float) -> None:
        """Learns from a step that had decode rows alone."""
        took_ms = (applied_s - max(self._applied_s, step.planned_s)) * 1e3
        self._applied_s = applied_s
        num_rows = step.decode_tokens
        if took_ms <= 0 or num_rows < len(step.rows) or not num_rows:
            return
        if num_rows > len(step.rows) and num_rows != sum(step.ends) - sum(step.starts):
            return  # a chunk of a prompt, next to rows with drafts
        num_tokens = sum(step.starts)
        fit = self._fit()
        if fit is not None:
            took_ms = min(took_ms, _MOST_GROWTH * max(self._sums[2] / self._weight, fit.of_step(num_rows, num_tokens)))
        self._weight = _KEPT * self._weight + 1
        newest = (
            num_rows,
            num_tokens,
            took_ms,
            num_rows**2,
            num_tokens**2,
            num_rows * num_tokens,
            num_rows * took_ms,
            num_tokens * took_ms,
        )
        self._sums = [_KEPT * kept + new for kept, new in zip(self._sums, newest, strict=True)]
        self._fitted = None

    def _fit(self) -> _Fit | None:
        """None before a step was seen."""
        if self._fitted is None and self._weight:
            rows, tokens, ms, row_squares, token_squares, both, rows_ms, tokens_ms = (
                each / self._weight for each in self._sums
            )
            known = self._known or (ms / rows, 0.0)
            per_row, per_token = _slopes(
                (max(0.0, row_squares - rows**2), max(0.0, token_squares - tokens**2)),
                both - rows * tokens,
                (rows_ms - rows * ms, tokens_ms - tokens * ms),
                least=((_LEAST_SPREAD * rows) ** 2, (_LEAST_SPREAD * max(tokens, 1.0)) ** 2),
                known=known,
            )
            per_row, per_token = max(per_row, _LEAST_KEPT * known[0]), max(per_token, _LEAST_KEPT * known[1])
            of_rows_ms = per_row * rows + per_token * tokens
            if of_rows_ms > ms:  # a step without a row takes no less than nothing
                per_row, per_token = per_row * ms / of_rows_ms, per_token * ms / of_rows_ms
            self._known = (
                known[0] + _LEARNT * (per_row - known[0]),
                known[1] + _LEARNT * (per_token - known[1]),
            )
            self._fitted = _Fit(max(0.0, ms - of_rows_ms), per_row, per_token)
        return self._fitted


def _slopes(
    variances: tuple[float, float],
    covariance: float,
    with_ms: tuple[float, float],
    *,
    least: tuple[float, float],
    known: tuple[float, float],
) -> tuple[float, float]:
    """By rows and by tokens, none below 0: what is `known`, and what the steps say beyond it, the more they differ."""
    own = variances[0] + least[0], variances[1] + least[1]
    beyond = (
        with_ms[0] - known[0] * variances[0] - known[1] * covariance,
        with_ms[1] - known[1] * variances[1] - known[0] * covariance,
    )
    determinant = own[0] * own[1] - covariance**2
    by_row = known[0] + (beyond[0] * own[1] - beyond[1] * covariance) / determinant
    by_token = known[1] + (beyond[1] * own[0] - beyond[0] * covariance) / determinant
    if by_row < 0:
        return 0.0, max(0.0, (with_ms[1] + least[1] * known[1]) / own[1])
    if by_token < 0:
        return max(0.0, (with_ms[0] + least[0] * known[0]) / own[0]), 0.0
    return by_row, by_token


def _sums_by_tenant(costs_ms: Mapping[Sequence, float]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for sequence, cost_ms in costs_ms.items():
        sums[sequence.request.tenant] = sums.get(sequence.request.tenant, 0.0) + cost_ms
    return sums
