"""`DraftPace`: how many drafts a step is worth, from what was accepted of its rows and from what steps took.

A row's j-th draft is sampled with probability p^j, where p is the share of the row's drafts that were accepted before a
first refused one, recent ones counting more; it begins with that of other requests. A step has the likeliest B drafts
of all its rows, for the B with the most tokens a second:

    (rows + sum of the B largest probabilities) / ms of a step with about B drafts

What steps take is learnt for about as many rows, and drafts up to each power of two: without drafts first, and now and
then; with twice as many as before once, where these would be worth it if each cost what those before did. So B is 0
where drafts only cost. A row that has none has one again after `RETRY_TOKENS` tokens, where one that is right would be
worth it. Nothing depends on chance, and no token on any of this.
"""

import math
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field

from openinfer_engine.scheduler.sequence import Sequence
from openinfer_engine.scheduler.step_builder import StepInFlight

RETRY_TOKENS = 64
_PLAIN_STEPS = 3  # without drafts, before the first with
_PLAIN_EVERY, _DRAFTS_EVERY = 256, 1024  # steps after which a time without, or with drafts is learnt anew
_LEAST_GAIN = 1.01  # of further drafts
_FIRST_ACCEPTED, _PREDICTED = 0.7, 0.9  # probabilities before anything is known
_PRIOR_WEIGHT = 2.0
_ROW_DECAY, _ALL_DECAY = 0.95, 0.98
_WAY = 0.25  # share of the way to the newest step's time


@dataclass(slots=True)
class _Time:
    """What steps of about so many rows and drafts took."""

    ms: float
    step: int  # with so many rows, of the last one
    count: int = 1


@dataclass(slots=True)
class _Times:
    """Of steps of about so many rows, by `int.bit_length` of their drafts."""

    by_drafts: dict[int, _Time] = field(default_factory=dict[int, _Time])
    steps: int = 0

    def note(self, num_drafts: int, took_ms: float) -> None:
        self.steps += 1
        known = self.by_drafts.get(num_drafts.bit_length())
        if known is None:
            self.by_drafts[num_drafts.bit_length()] = _Time(took_ms, self.steps)
        else:
            known.ms += _WAY * (took_ms - known.ms)
            known.step, known.count = self.steps, known.count + 1

    @property
    def plain(self) -> _Time | None:
        """None while steps without drafts are to be timed."""
        known = self.by_drafts.get(0)
        if known is None or known.count < _PLAIN_STEPS or self.steps - known.step >= _PLAIN_EVERY:
            return None
        return known

    def with_drafts(self, size: int) -> _Time | None:
        known = self.by_drafts.get(size)
        return None if known is None or self.steps - known.step >= _DRAFTS_EVERY else known


class DraftPace:
    """See the module; a step with drafts takes at most `max_itl_ms`, as far as is known."""

    def __init__(self, max_itl_ms: int | None) -> None:
        self._max_ms = float("inf") if max_itl_ms is None else max_itl_ms
        self._times: dict[int, _Times] = {}
        self._accepted = self._refused = 0.0
        self._applied_s = float("-inf")
        self._least = 1.0  # probability of the drafts that the step has

    def begin_step(self, rows: ListLike[Sequence], *, max_drafts: int, budget_tokens: int) -> int:
        """Drafts of a step with these decode rows at most; `most_drafts` is asked for each row then."""
        times, self._least = self._times_of(len(rows)), 1.0
        plain = times.plain
        if plain is None or not budget_tokens:
            return 0
        chances: list[float] = []
        for sequence in rows:
            share = self._share(sequence)
            chances += [share**place for place in range(1, max_drafts + 1)]
        chances.sort(reverse=True)
        del chances[budget_tokens:]
        num_drafts = self._best(chances, times, plain, num_rows=len(rows))
        if num_drafts:
            self._least = chances[num_drafts - 1]
            return num_drafts
        return int(_is_worth_trying(times, plain, num_rows=len(rows)))

    def _best(self, chances: ListLike[float], times: _Times, plain: _Time, *, num_rows: int) -> int:
        best, best_rate, below_ms, draft_ms = 0, num_rows / plain.ms, plain.ms, 0.0
        tokens, place = float(num_rows), 0
        for size in range(1, len(chances).bit_length() + 1):
            end = min((1 << size) - 1, len(chances))
            tokens += math.fsum(chances[place:end])
            known = times.with_drafts(end.bit_length())
            took_ms = below_ms + (end - place) * draft_ms if known is None else known.ms
            place = end
            if took_ms > self._max_ms:
                break
            if tokens / took_ms > _LEAST_GAIN * best_rate:
                best, best_rate = end, tokens / took_ms
            if known is None or end == len(chances):
                break
            below_ms, draft_ms = known.ms, max(0.0, known.ms - plain.ms) / end
        return best

    def most_drafts(self, sequence: Sequence, max_drafts: int) -> int:
        """Drafts of a row of the step; of one that is worth none, sometimes one."""
        worth = int(math.log(self._least) / math.log(self._share(sequence)) + 1e-9)
        if worth:
            sequence.draft_retry_tokens = 0
            return min(worth, max_drafts)
        if not sequence.draft_retry_tokens:
            sequence.draft_retry_tokens = sequence.known_tokens + RETRY_TOKENS
        if sequence.known_tokens < sequence.draft_retry_tokens:
            return 0
        sequence.draft_retry_tokens = sequence.known_tokens + RETRY_TOKENS
        return 1

    def _times_of(self, num_rows: int) -> _Times:
        # Rows to four binary digits: times of many and of few rows, taken together, would say that drafts are free.
        low_bits = max(0, num_rows.bit_length() - 4)
        return self._times.setdefault(num_rows >> low_bits << low_bits, _Times())

    def _share(self, sequence: Sequence) -> float:
        first = _PREDICTED if sequence.request.prediction_token_ids else self._first_share()
        accepted, refused = sequence.recent_accepted, sequence.recent_refused
        return min((accepted + _PRIOR_WEIGHT * first) / (accepted + refused + _PRIOR_WEIGHT), 0.999)

    def _first_share(self) -> float:
        weight = _PRIOR_WEIGHT
        return (self._accepted + weight * _FIRST_ACCEPTED) / (self._accepted + self._refused + weight)

    def note_row(self, sequence: Sequence, *, planned: int, accepted: int) -> None:
        """Takes in what became of a row's drafts; those that the device did not have cost as much as refused ones."""
        is_refused = accepted < planned
        sequence.recent_accepted = _ROW_DECAY * sequence.recent_accepted + accepted
        sequence.recent_refused = _ROW_DECAY * sequence.recent_refused + is_refused
        self._accepted = _ALL_DECAY * self._accepted + accepted
        self._refused = _ALL_DECAY * self._refused + is_refused

    def note_step(self, step: StepInFlight, *, applied_s: float) -> None:
        """Takes in what a step took, from the result before to its own, unless it had tokens of prompts."""
        took_ms = (applied_s - max(self._applied_s, step.planned_s)) * 1e3
        self._applied_s = applied_s
        num_rows = len(step.rows)
        if took_ms > 0 and num_rows and sum(step.ends) - sum(step.starts) == step.decode_tokens:
            self._times_of(num_rows).note(step.decode_tokens - num_rows, took_ms)


def _is_worth_trying(times: _Times, plain: _Time, *, num_rows: int) -> bool:
    """Whether one draft would be worth its time if it were surely sampled, as far as that is known."""
    known = times.with_drafts(1)
    return known is None or (num_rows + 1) / known.ms > _LEAST_GAIN * num_rows / plain.ms
