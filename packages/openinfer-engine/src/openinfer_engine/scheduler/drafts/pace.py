"""`DraftPace`: how many drafts a step is worth, from what was accepted of its rows and from what steps took.

A row's j-th draft is sampled with probability p^j, where p is the share of the row's drafts that were accepted before a
first refused one (`DraftRecord`). A step has the likeliest B drafts of all its rows, for the B with the most tokens a
second (`StepTimes` has the times):

    (rows + sum of the B largest probabilities) / ms of a step with about B drafts

So B is 0 where drafts only cost. What is not known is tried: drafts whose steps were not timed lately, as if further
ones cost nothing, and rows that have had no drafts for a while, as if theirs were sampled. All that is paid from one
*allowance*, in ms: 0.75 % of the time of decode steps goes there, and what a step with drafts saved or lost: what
its tokens take without drafts, less its own time. Drafts in a step that also has tokens of prompts are taken to cost
there what they cost without these, since how long such a step takes says nothing about them. What is tried must be
affordable at its worst, and where the allowance is spent there are no drafts at all. So whatever drafts, acceptance and
times do, a run loses less than a hundredth of its time to them; where drafts cost little they are tried often, and
where they cost much, seldom.

Nothing depends on chance, and no token on any of this.
"""

import math
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain, repeat
from operator import mul

from openinfer_core.scheduling import DecodeStepTime
from openinfer_engine.scheduler.drafts.record import DraftRecord
from openinfer_engine.scheduler.drafts.times import RowTimes, StepTimes
from openinfer_engine.scheduler.sequence import Sequence
from openinfer_engine.scheduler.step_builder import StepInFlight

ALLOWED_SHARE = 0.0075
"""Of the time of decode steps, for what is tried."""
FIRST_ALLOWANCE, MOST_ALLOWANCE = 0.5, 3.0
"""In steps without drafts."""
_LEAST_GAIN, _FURTHER_GAIN = 1.05, 1.03  # over a step without drafts, and of further ones
_FIRST_WEIGHT = 8.0  # in drafts
_LEAST_CHANCE = 0.02  # of a draft that is looked at
_MOST_TIMES = 4  # steps without drafts that a step is paid for, if nothing says that it takes as long
_ROUNDING = 1e-9
_FIRST_ACCEPTED, _PREDICTED, _TRIED = 0.7, 0.9, 0.95  # shares before anything is known, and of what is tried


@dataclass(frozen=True, slots=True)
class _Choice:
    """The likeliest drafts of a step, the tokens a ms that are hoped for, and what it can lose at worst, in ms."""

    num_drafts: int
    least: float
    """Probability of the least likely one."""
    rate: float
    loss_ms: float = 0.0


class DraftPace:
    """See the module; a step with drafts takes at most `max_itl_ms`, as far as is known."""

    def __init__(self, max_itl_ms: int | None) -> None:
        self._max_ms = float("inf") if max_itl_ms is None else max_itl_ms
        self._times = StepTimes()
        self._allowance_ms: float | None = None  # None before steps were timed
        self._all = DraftRecord()
        self._applied_s = float("-inf")
        self._shares: list[float] = []  # of each row of the step: accepted ones of its drafts, as is hoped for
        self._tried: ListLike[bool] = ()
        self._least = 1.0  # probability of the drafts that the step has

    def take_step_times(self, times: ListLike[DecodeStepTime]) -> None:
        """Takes in what steps took that were run to be timed, as if they had been this engine's first."""
        for each in times:
            self._times.note(each.num_rows, each.num_drafts, each.ms)

    # --- plan -------------------------------------------------------------------------------------------

    def begin_step(self, rows: ListLike[Sequence], *, max_drafts: int, budget_tokens: int) -> int:
        """Drafts of a step with these decode rows at most; `most_drafts` is asked for each row then."""
        if not rows or not budget_tokens:
            return 0
        times = self._times.of(len(rows))
        plain_ms = times.plain_ms
        if plain_ms is None or times.is_plain_due or self._allowance(plain_ms) < 0:
            return 0
        room = {"max_drafts": max_drafts, "budget_tokens": budget_tokens}
        choose = partial(self._choose, times=times, plain_ms=plain_ms, **room)
        self._shares, self._tried = [self._share(each) for each in rows], [False] * len(rows)
        choice = choose(self._shares)
        if any(each.draft_record.is_due(each.known_tokens) for each in rows):
            # Those that are due soon are tried with them: a step with drafts costs about the same for all.
            tried = [
                share < _TRIED and each.draft_record.is_due(each.known_tokens, soon=True)
                for share, each in zip(self._shares, rows, strict=True)
            ]
            others = [share for share, is_tried in zip(self._shares, tried, strict=True) if not is_tried]
            hoped = choose(others, num_tried=sum(tried), instead_of=choice)
            if hoped.num_drafts > choice.num_drafts:
                choice, self._tried = hoped, tried
        self._least = choice.least
        return choice.num_drafts

    def _choose(
        self,
        shares: ListLike[float],
        *,
        times: RowTimes,
        plain_ms: float,
        max_drafts: int,
        budget_tokens: int,
        num_tried: int = 0,
        instead_of: _Choice | None = None,
    ) -> _Choice:
        """The drafts with the most tokens a ms, among those that can be afforded if all that are tried are refused."""
        num_rows = len(shares) + num_tried
        hoped_for = [chance for chance in accumulate(repeat(_TRIED, max_drafts), mul) for _ in range(num_tried)]
        chances = sorted(chain(hoped_for, *(_chances_of(share, max_drafts) for share in shares)), reverse=True)
        del chances[budget_tokens:]
        tokens = list(accumulate(chances, initial=float(num_rows)))
        in_vain = list(accumulate(hoped_for, initial=0.0))
        best = _Choice(0, 1.0, num_rows / plain_ms) if instead_of is None else replace(instead_of, num_drafts=0)
        least_rate = _LEAST_GAIN * num_rows / plain_ms
        affordable_ms = self._allowance(plain_ms) + (0.0 if instead_of is None else instead_of.loss_ms)
        goes_beyond = False
        for size in range(1, len(chances).bit_length() + 1):
            end = min((1 << size) - 1, len(chances))
            bounds, least = times.bounds(end), chances[end - 1]
            if bounds.least_ms > self._max_ms or (goes_beyond and num_rows > 1):
                break  # sizes are tried in turn: a row that gains nothing pays for the step that others gain by
            goes_beyond = bounds.is_beyond
            honest = tokens[end] - in_vain[min(end, sum(each >= least for each in hoped_for))]
            rate, loss_ms = tokens[end] / bounds.least_ms, bounds.most_ms - plain_ms * honest / num_rows
            # What was never timed may also be refused altogether, for a step's time beyond the allowance at most.
            risk_ms = loss_ms if bounds.is_timed else max(loss_ms, bounds.most_ms - 2 * plain_ms)
            if rate > max(least_rate, _FURTHER_GAIN * best.rate) and risk_ms <= affordable_ms:
                best = _Choice(end, least, rate, loss_ms)
        return best

    def most_drafts(self, row: int, sequence: Sequence, max_drafts: int) -> int:
        """Drafts of a row of the step."""
        is_tried = self._tried[row]
        share = _TRIED if is_tried else self._shares[row]
        num_drafts = min(int(math.log(self._least) / math.log(share) + _ROUNDING), max_drafts)
        if num_drafts > 0:
            sequence.draft_record.note_planned(sequence.known_tokens, is_tried=is_tried)
        return num_drafts

    # --- apply ------------------------------------------------------------------------------------------

    def note_row(self, sequence: Sequence, *, planned: int, accepted: int) -> None:
        """Takes in what became of a row's drafts; those that the device did not have cost as much as refused ones."""
        sequence.draft_record.note(planned=planned, accepted=accepted, share=self._share(sequence))
        self._all.note(planned=planned, accepted=accepted)  # of many requests: a run says nothing

    def note_step(self, step: StepInFlight, *, num_tokens: int, applied_s: float) -> None:
        """Takes in what a step took, from the result before to its own; `num_tokens` are those of its decode rows."""
        took_ms = (applied_s - max(self._applied_s, step.planned_s)) * 1e3
        self._applied_s = applied_s
        num_rows = step.decode_rows
        if took_ms <= 0 or not num_rows:
            return
        times, num_drafts = self._times.of(num_rows), step.decode_tokens - num_rows
        plain_ms = times.plain_ms
        if plain_ms is not None:
            most_ms = times.bounds(num_drafts).most_ms if num_drafts else plain_ms
            paid_ms = most_ms if step.has_chunks else min(took_ms, max(2 * most_ms, _MOST_TIMES * plain_ms))
            self._pay(paid_ms, plain_ms, num_drafts=num_drafts, num_tokens=num_tokens / num_rows)
        if not step.has_chunks:
            times.note(num_drafts, took_ms)

    def _pay(self, took_ms: float, plain_ms: float, *, num_drafts: int, num_tokens: float) -> None:
        """`num_tokens` are those of a row in the mean."""
        paid_ms = self._allowance(plain_ms) + ALLOWED_SHARE * took_ms
        if num_drafts:
            paid_ms += plain_ms * num_tokens - took_ms
        self._allowance_ms = min(paid_ms, MOST_ALLOWANCE * plain_ms)

    def _allowance(self, plain_ms: float) -> float:
        return FIRST_ALLOWANCE * plain_ms if self._allowance_ms is None else self._allowance_ms

    def _share(self, sequence: Sequence) -> float:
        if sequence.request.prediction_token_ids:
            return sequence.draft_record.share(_PREDICTED)
        return sequence.draft_record.share(self._all.share(_FIRST_ACCEPTED, weight=_FIRST_WEIGHT))


def _chances_of(share: float, max_drafts: int) -> list[float]:
    """Of a row's drafts, one after the other, as long as they are worth a look."""
    chances: list[float] = []
    chance = share
    while len(chances) < max_drafts and chance > _LEAST_CHANCE:
        chances.append(chance)
        chance *= share
    return chances
