"""`StepTimes`: what decode steps took lately, by their rows and by their drafts, and what others can take.

A time is a mean in which recent steps count more, and no step for more than twice what was known: a machine that
stands still for a moment says nothing about drafts. It is not trusted for ever, the less the fewer steps it is made of.
Of drafts whose steps were never timed two bounds are known: further drafts cost nothing, or as much each as the last
ones that were timed, or as a row does. Steps of rows that were never timed take what lies between those of fewer and
of more rows.
"""

from dataclasses import dataclass, field

PLAIN_STEPS = 3
"""Steps without drafts before the first with."""
PLAIN_EVERY = 128
"""Steps after which one without drafts is timed again."""
_AGE_PER_STEP, _MOST_AGE = 64, 1024  # steps for which a time with drafts is trusted: for each that was timed; at most
_WAY = 0.25  # share of the way to the newest step's time


@dataclass(slots=True)
class TimedSteps:
    """Steps of about so many rows and drafts."""

    ms: float
    step: int
    """With so many rows, of the last one."""
    num_drafts: int
    """Of the last one."""
    count: int = 1

    def note(self, took_ms: float, *, step: int, num_drafts: int) -> None:
        if num_drafts > self.num_drafts:  # dearer ones of the same size
            self.ms = max(self.ms, min(took_ms, 2 * self.ms))
        elif self.count < PLAIN_STEPS:  # of the first ones the shortest: something may be loaded by another
            self.ms = min(self.ms, took_ms)
        else:
            self.ms += _WAY * (min(took_ms, 2 * self.ms) - self.ms)
        self.step, self.num_drafts, self.count = step, num_drafts, self.count + 1


@dataclass(frozen=True, slots=True)
class StepBounds:
    """What a step can take, in ms; both are the same where it was timed."""

    least_ms: float
    most_ms: float
    is_beyond: bool = False
    """Whether fewer drafts were timed, and so many never."""

    @property
    def is_timed(self) -> bool:
        return self.least_ms == self.most_ms


@dataclass(slots=True)
class RowTimes:
    """Of steps of about so many rows, by `int.bit_length` of their drafts."""

    num_rows: int
    by_drafts: dict[int, TimedSteps] = field(default_factory=dict[int, TimedSteps])
    steps: int = 0

    def note(self, num_drafts: int, took_ms: float) -> None:
        self.steps += 1
        known = self.by_drafts.get(num_drafts.bit_length())
        if known is None:
            self.by_drafts[num_drafts.bit_length()] = TimedSteps(took_ms, self.steps, num_drafts)
        else:
            known.note(took_ms, step=self.steps, num_drafts=num_drafts)

    @classmethod
    def between(cls, fewer: "RowTimes", more: "RowTimes", *, num_rows: int) -> "RowTimes":
        """As if timed, from what steps of fewer and of more rows took with about as many drafts for each row."""
        made = cls(num_rows)
        share = (num_rows - fewer.num_rows) / (more.num_rows - fewer.num_rows)
        for timed in more.by_drafts.values():
            least = min(1, timed.num_drafts)  # a step with few drafts is one with some
            other = fewer.by_drafts.get(max(least, timed.num_drafts * fewer.num_rows // more.num_rows).bit_length())
            if other is not None:
                num_drafts = max(least, timed.num_drafts * num_rows // more.num_rows)
                ms, count = other.ms + share * (timed.ms - other.ms), min(timed.count, other.count)
                made.by_drafts[num_drafts.bit_length()] = TimedSteps(ms, 0, num_drafts, count)
        return made

    @property
    def plain_ms(self) -> float | None:
        """Of a step without drafts; None before the first ones."""
        known = self.by_drafts.get(0)
        return None if known is None or known.count < PLAIN_STEPS else known.ms

    @property
    def is_plain_due(self) -> bool:
        return self.plain_ms is None or self.steps - self.by_drafts[0].step >= PLAIN_EVERY

    def bounds(self, num_drafts: int) -> StepBounds:
        """Of a step with drafts, as soon as some without were timed."""
        size = num_drafts.bit_length()
        known = self.by_drafts.get(size)
        smaller = [self.by_drafts[0]]
        smaller += [each for key, each in sorted(self.by_drafts.items()) if 0 < key < size and self._is_trusted(each)]
        # A row costs no less than a draft; from two times on, the last drafts tell what further ones cost.
        last, each_ms = smaller[-1], smaller[0].ms / self.num_rows
        if len(smaller) > 1:
            each_ms = max(0.0, last.ms - smaller[-2].ms) / max(1, last.num_drafts - smaller[-2].num_drafts)
        if known is not None and self._is_trusted(known):
            slope_ms = max(0.0, known.ms - last.ms) / max(1, known.num_drafts - last.num_drafts)
            ms = known.ms + max(0, num_drafts - known.num_drafts) * slope_ms
            return StepBounds(ms, ms)
        least_ms = max(each.ms for each in smaller)
        most_ms = last.ms + max(0, num_drafts - last.num_drafts) * each_ms if known is None else known.ms
        return StepBounds(least_ms, max(most_ms, least_ms * _UNTIMED), is_beyond=known is None and len(smaller) > 1)

    def _is_trusted(self, timed: TimedSteps) -> bool:
        return self.steps - timed.step < min(_AGE_PER_STEP * timed.count, _MOST_AGE)


_UNTIMED = 1 + 1e-9  # what is not timed is never exact


class StepTimes:
    """By rows, to four binary digits: times of many and of few, taken together, would say that drafts are free."""

    def __init__(self) -> None:
        self._by_rows: dict[int, RowTimes] = {}

    def note(self, num_rows: int, num_drafts: int, took_ms: float) -> None:
        """Takes in a step of rows of which no others need be known."""
        about = _about(num_rows)
        self._by_rows.setdefault(about, RowTimes(about)).note(num_drafts, took_ms)

    def of(self, num_rows: int) -> RowTimes:
        about = _about(num_rows)
        found = self._by_rows.get(about)
        if found is None:
            found = self._by_rows[about] = self._make(about)
        return found

    def _make(self, num_rows: int) -> RowTimes:
        known = [each.num_rows for each in self._by_rows.values() if each.plain_ms is not None]
        fewer = max((each for each in known if each < num_rows), default=0)
        more = min((each for each in known if each > num_rows), default=0)
        if 2 * fewer < num_rows or not more or more > 2 * num_rows:
            return RowTimes(num_rows)
        return RowTimes.between(self._by_rows[fewer], self._by_rows[more], num_rows=num_rows)


def _about(num_rows: int) -> int:
    low_bits = max(0, num_rows.bit_length() - 4)
    return num_rows >> low_bits << low_bits
