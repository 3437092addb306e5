"""`ItlLimiter`: how many prompt tokens a step may compute next to decode rows, so that these do not wait too long.

    predicted ms of a step  =  ms of the last steps without prompt tokens  +  tokens x ms per token

What a step takes however few tokens it has (its launches, and the reading of all weights) is no token's: next to decode
rows it is in what these take, and in a step of prompts alone it is what the quicker of the steps of decode rows took.
Counted for the tokens it would make steps shorter, and so each token dearer, down to `LEAST_TOKENS`. Before there was a
step of decode rows alone it follows from two steps of prompts of which one had at least twice as many tokens.

Prompts of one tenant next to decode rows of another have `OTHERS_MS`, a third of what the step takes without the
tenant, or as long as the other's rows take, also where no limit is set, less what decode rows of its own take: what one
tenant does shall not make another's tokens come half as fast. Where another tenant had rows a moment ago and has none
now, prompts have `OTHERS_MS`: its next request waits for the step in flight; where one had rows in the last minute,
`company.ALONE_MS`.

A step of prompts alone is `LONE_MS` long at most, where it has more than `LONE_TOKENS`: who comes first waits for it.

All follow what steps took: from the result before to their own, since a step is planned while the one before runs.
They rise quickly and fall slowly, so that they are near the dearer steps: the limit is meant for most steps, not for
the mean; that of steps of prompts alone falls quickly, too, since a GPU's first long step is no measure. Prompts go on
however little time there is, by `LEAST_TOKENS` in a step.
"""

from openinfer_engine.scheduler.step_builder import StepInFlight

LEAST_TOKENS = 16
OTHERS_MS = 5.0
LONE_MS = 150.0
LONE_TOKENS = 256  # shorter steps of prompts say little of what a token costs in longer ones
FIRST_TOKENS = 256  # of a step before any with prompt tokens was timed
_RISE, _FALL = 0.5, 0.05  # share of the way to the newest step's cost
_DRIFT = 0.005  # the same of the quickest steps, to one that took longer
_MOST_GROWTH = 2.0  # a step counts as at most so many times what is known: the host was busy with something else


class ItlLimiter:
    """Keeps the cost of steps and the budget that follows from it; `max_itl_ms` None leaves one tenant `LONE_MS`."""

    __slots__ = ("_applied_s", "_decode_ms", "_least_ms", "_lone", "_long_token_ms", "_max_ms", "_token_ms")

    def __init__(self, max_itl_ms: int | None) -> None:
        self._max_ms = max_itl_ms
        self._decode_ms: float | None = None
        self._least_ms = 0.0  # that a step takes, as far as it is known
        self._lone: tuple[int, float] | None = None  # tokens and time of the last step of prompts alone
        self._token_ms: float | None = None
        self._long_token_ms: float | None = None  # in steps of so many that their number hardly matters
        self._applied_s = float("-inf")

    def budget_tokens(
        self,
        budget_tokens: int,
        *,
        decode_rows: int,
        others_ms: float | None = None,
        least_tokens: int = LEAST_TOKENS,
    ) -> int:
        """Prompt tokens that a step may compute, at most `budget_tokens`.

        Args:
            budget_tokens: that are left of the step's own.
            decode_rows: of the step.
            others_ms: that the prompts have because of other tenants; None where there are none.
            least_tokens: that they have however long these take.
        """
        if self._long_token_ms is not None:
            budget_tokens = min(budget_tokens, max(LONE_TOKENS, int(LONE_MS / self._long_token_ms)))
        limit_ms = None if decode_rows == 0 else self._max_ms
        if limit_ms is None and others_ms is None:
            return budget_tokens
        if self._token_ms is None:
            return min(budget_tokens, FIRST_TOKENS)
        room_ms = float("inf") if limit_ms is None else limit_ms - (self._decode_ms or 0.0)
        if others_ms is not None:
            room_ms = min(room_ms, others_ms)
        return min(budget_tokens, max(least_tokens, int(room_ms / self._token_ms)))

    @property
    def least_prompt_ms(self) -> float:
        """What the least that prompts have of a step takes, as far as it is known."""
        return LEAST_TOKENS * (self._token_ms or 0.0)

    def note(self, step: StepInFlight, *, applied_s: float) -> None:
        took_ms = (applied_s - max(self._applied_s, step.planned_s)) * 1e3
        self._applied_s = applied_s
        if took_ms <= 0:
            return
        prompt_tokens = sum(step.ends) - sum(step.starts) - step.decode_tokens
        if prompt_tokens == 0:
            self._decode_ms = _follow(self._decode_ms, took_ms)
            self._least_ms = _follow_least(self._least_ms or took_ms, took_ms)
        else:
            if self._decode_ms is None and not step.decode_tokens:
                self._compare(prompt_tokens, took_ms)
            knows_rows = step.decode_tokens > 0 and self._decode_ms is not None
            without_ms = (self._decode_ms or 0.0) if knows_rows else self._least_ms
            token_ms = max(took_ms - without_ms, 0.1 * took_ms) / prompt_tokens
            self._token_ms = _follow(self._token_ms, token_ms)
            if prompt_tokens >= LONE_TOKENS:
                self._long_token_ms = _follow(self._long_token_ms, token_ms, fall=_RISE)

    def _compare(self, tokens: int, took_ms: float) -> None:
        """With the step of prompts before: a line through the two says what a step without tokens would take."""
        before, self._lone = self._lone, (tokens, took_ms)
        (fewer, fewer_ms), (more, more_ms) = sorted((before or self._lone, self._lone))
        if more >= 2 * fewer and more_ms > fewer_ms:
            self._least_ms = max(0.0, fewer_ms - fewer * (more_ms - fewer_ms) / (more - fewer))


def _follow(known: float | None, newest: float, *, fall: float = _FALL) -> float:
    if known is None:
        return newest
    way = min(newest, _MOST_GROWTH * known) - known
    return known + (_RISE if way > 0 else fall) * way


def _follow_least(known: float, newest: float) -> float:
    way = min(newest, _MOST_GROWTH * known) - known
    return known + (_RISE if way < 0 else _DRIFT) * way
