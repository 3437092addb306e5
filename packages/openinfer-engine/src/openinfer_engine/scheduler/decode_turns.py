"""`DecodeTurns`: which decode rows of a tenant have a step, where more of them would make another tenant's rows slow.

    time of a step  =  time without a row  +  rows x time per row

What the decode rows of one tenant may add to a step next to decode rows of others has a bound: `ROWS_MS`, or as long
as the step would take without them. Where it has more rows, they take turns in order of age, so each goes on and none
falls behind; what sits a step out keeps its slot and blocks. A tenant with half of the rows or fewer is within the
bound whatever a row costs. One next to prompts of others alone has none: these may take as long as its rows do
(`itl_limit.py`).

A turn is `TURN_STEPS` long, so that those that have it soon have gone on far enough to give way to a newcomer
(`row_shares.py`). Where half of the rows have a step, turns are one step long: then none waits for two.

The times follow what steps took, by a line through the last ones, each of which counts a little less than the one after
(least squares with exponential forgetting: Haykin, Adaptive Filter Theory, chapter 10). Where all had about as many
rows, the time is taken for the rows' alone: then a row is never cheaper than it seems.
"""

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as ListLike

from openinfer_engine.scheduler.itl_limit import OTHERS_MS
from openinfer_engine.scheduler.sequence import Sequence
from openinfer_engine.scheduler.step_builder import StepInFlight

LEAST_ROWS = 4
TURN_STEPS = 16
ROWS_MS = 10.0
_KEPT = 0.95  # of the weight of earlier steps with each newer one
_LEAST_SPREAD = 0.1  # of the mean number of rows: with less, a line through them means nothing
_MOST_GROWTH = 2.0  # a step counts as at most so many times the mean: the host was busy with something else


class _Turn:
    """Of one tenant's rows."""

    __slots__ = ("_first", "_left")

    def __init__(self) -> None:
        self._first = -1  # age of the first row that has it, or of where that would be
        self._left = TURN_STEPS

    def others(self, rows: ListLike[Sequence], most: int) -> ListLike[Sequence]:
        """All of these, oldest first, but so many; called once a step."""
        first = next((place for place, sequence in enumerate(rows) if sequence.admission >= self._first), 0)
        in_order = [*rows[first:], *rows[:first]]
        self._left -= 1
        if self._left <= 0 or len(rows) <= 2 * most:
            self._first, self._left = in_order[most].admission, TURN_STEPS
        return in_order[most:]


class DecodeTurns:
    """Of one scheduler."""

    __slots__ = ("_applied_s", "_ms", "_rows", "_rows_ms", "_squares", "_turns", "_weight")

    def __init__(self) -> None:
        self._turns: dict[str, _Turn] = {}  # by tenant
        self._applied_s = float("-inf")
        self._weight = self._rows = self._ms = self._squares = self._rows_ms = 0.0  # sums over steps

    def sitting_out(self, ready: Iterable[Sequence], decoding: Counter[str]) -> frozenset[Sequence]:
        """Those without a row in the next step.

        Args:
            ready: sequences that may decode, oldest first.
            decoding: how many decode, by tenant, those without a mask for the next step among them.
        """
        by_tenant: dict[str, list[Sequence]] = {}
        for sequence in ready:
            by_tenant.setdefault(sequence.request.tenant, []).append(sequence)
        num_decoding = decoding.total()
        sitting: set[Sequence] = set()
        for tenant, rows in by_tenant.items():
            most = self._most_rows(others=num_decoding - decoding[tenant])
            if most is not None and len(rows) > most:
                sitting.update(self._turns.setdefault(tenant, _Turn()).others(rows, most))
        for tenant in self._turns.keys() - decoding.keys():
            del self._turns[tenant]
        return frozenset(sitting)

    def left_ms(self, *, own: int, others: int) -> float:
        """Of what one tenant may add to a step next to rows of others, what so many rows of its own leave."""
        if not self._weight or not others:
            return OTHERS_MS
        return max(OTHERS_MS, self._predicted_ms(others)) - own * self._row_ms()

    def note(self, step: StepInFlight, *, applied_s: float) -> None:
        """Learns from a step that had decode rows alone."""
        took_ms = (applied_s - max(self._applied_s, step.planned_s)) * 1e3
        self._applied_s = applied_s
        num_rows = step.decode_tokens
        if took_ms <= 0 or num_rows < len(step.rows) or not num_rows:
            return
        if num_rows > len(step.rows) and num_rows != sum(step.ends) - sum(step.starts):
            return  # a chunk of a prompt, next to rows with drafts
        if self._weight:
            took_ms = min(took_ms, _MOST_GROWTH * max(self._ms / self._weight, self._predicted_ms(num_rows)))
        self._weight = _KEPT * self._weight + 1
        self._rows = _KEPT * self._rows + num_rows
        self._ms = _KEPT * self._ms + took_ms
        self._squares = _KEPT * self._squares + num_rows**2
        self._rows_ms = _KEPT * self._rows_ms + num_rows * took_ms

    def _most_rows(self, *, others: int) -> int | None:
        """Rows that a tenant may have, next to so many of others; None for any number."""
        if not self._weight or not others:
            return None
        row_ms = self._row_ms()
        room_ms = max(ROWS_MS, self._predicted_ms(others))
        return max(LEAST_ROWS, others, int(room_ms / row_ms)) if row_ms > 0 else None

    def _row_ms(self) -> float:
        mean_rows, mean_ms = self._rows / self._weight, self._ms / self._weight
        spread = self._squares / self._weight - mean_rows**2
        if spread <= (_LEAST_SPREAD * mean_rows) ** 2:
            return mean_ms / mean_rows
        slope = (self._rows_ms / self._weight - mean_rows * mean_ms) / spread
        return min(max(slope, 0.0), mean_ms / mean_rows)

    def _predicted_ms(self, num_rows: int) -> float:
        mean_rows, mean_ms = self._rows / self._weight, self._ms / self._weight
        return mean_ms + (num_rows - mean_rows) * self._row_ms()
