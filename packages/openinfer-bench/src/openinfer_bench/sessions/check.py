"""The correctness arm: turns that the cache helped are asked again where it cannot help, and must say the same.

A turn is repeated with a salt that no request had before, so that nothing cached is its own. Both runs are greedy and
tell log-probabilities. Where the two say different tokens, the sequences part: the first difference is compared, and
nothing after it. It is a *tie* if the uncached run itself found the two tokens equally likely, within `TIE_LOGPROB`:
batches of other sizes may sum in another order. Up to it, log-probabilities of equal tokens may differ by `tolerance`.
"""

import random
from collections.abc import Sequence
from enum import Enum

import msgspec

from openinfer_bench.serve.client import Client
from openinfer_bench.serve.messages import Job, ScoredToken, Target
from openinfer_bench.sessions.play import TOP_LOGPROBS, Played

TIE_LOGPROB = 0.02
MOST_TIES = 0.01
"""Of the turns that are compared."""


class Verdict(Enum):
    """Of a turn."""

    SAME = "same"
    TIE = "tie"
    DIFFERENT = "different"
    UNANSWERED = "unanswered"


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """One turn against itself without a cache."""

    session: str
    turn: int
    cached_tokens: int
    verdict: Verdict
    position: int | None = None
    """Of the first token that differs, or whose log-probability does."""
    difference: float = 0.0
    """The largest between log-probabilities of equal tokens, up to there."""
    what: str = ""


def compare(
    cached: Sequence[ScoredToken],
    uncached: Sequence[ScoredToken],
    *,
    tolerance: float,
    token_ids: tuple[Sequence[int], Sequence[int]] = ((), ()),
) -> tuple[Verdict, int | None, float, str]:
    """Verdict, position, largest difference of log-probabilities, and the difference in words.

    Args:
        cached: what the turn said.
        uncached: what it said without a cache.
        tolerance: of log-probabilities; 0 takes no tie either: engines whose kernels do not depend on the batch.
        token_ids: of both, where the server tells them: tokens may be spelled alike. Of two that are, it is not known
            which log-probability is whose, so they are no tie.
    """
    if not cached or len(cached) != len(uncached):
        return Verdict.UNANSWERED, None, 0.0, f"{len(cached)} tokens with log-probabilities, {len(uncached)} uncached"
    are_told = len(token_ids[0]) == len(token_ids[1]) == len(cached)
    largest = 0.0
    for position, (one, other) in enumerate(zip(cached, uncached, strict=True)):
        if are_told and one.text == other.text and token_ids[0][position] != token_ids[1][position]:
            what = f"token {token_ids[0][position]} instead of {token_ids[1][position]}, both {one.text!r}"
            return Verdict.DIFFERENT, position, largest, what
        if one.text != other.text:
            gap = other.logprob - other.top.get(one.text, float("-inf"))
            what = f"{one.text!r} instead of {other.text!r}, {gap:.4f} less likely without a cache"
            is_tie = tolerance > 0.0 and abs(gap) <= TIE_LOGPROB
            return (Verdict.TIE if is_tie else Verdict.DIFFERENT), position, largest, what
        difference = abs(one.logprob - other.logprob)
        largest = max(largest, difference)
        if difference > tolerance:
            return Verdict.DIFFERENT, position, largest, f"log-probability {one.logprob} instead of {other.logprob}"
    return Verdict.SAME, None, largest, ""


def choose(played: Sequence[Played], *, turns: int, seed: int) -> list[Played]:
    """A random sample of the turns that a cache helped."""
    helped = [each for each in played if not each.outcome.error and each.outcome.cached_tokens]
    if len(helped) <= turns:
        return helped
    return random.Random(seed).sample(helped, turns)  # noqa: S311 — a sample, no secret


async def check(
    target: Target, played: Sequence[Played], *, tolerance: float, salt: str, show: bool = True
) -> list[Comparison]:
    """Asks each turn again, one after the other, and compares.

    Args:
        target: the server.
        played: turns, with what they said.
        tolerance: see `compare`.
        salt: the beginning of the salts; no request may have used it.
        show: prints each difference.
    """
    client = Client(target)
    found: list[Comparison] = []
    try:
        for number, turn in enumerate(played):
            job = Job(
                prompt=turn.prompt,
                output_tokens=turn.output_tokens,
                cache_salt=f"{salt}-{number}",
                top_logprobs=TOP_LOGPROBS,
            )
            again = await client.run(job)
            if again.error or again.cached_tokens:
                what = again.error or f"{again.cached_tokens} tokens were cached under a salt that no request used"
                verdict, position, difference = Verdict.DIFFERENT if not again.error else Verdict.UNANSWERED, None, 0.0
            else:
                verdict, position, difference, what = compare(
                    turn.outcome.scored,
                    again.scored,
                    tolerance=tolerance,
                    token_ids=(turn.outcome.token_ids, again.token_ids),
                )
            found.append(
                Comparison(
                    session=turn.session,
                    turn=turn.turn,
                    cached_tokens=turn.outcome.cached_tokens,
                    verdict=verdict,
                    position=position,
                    difference=difference,
                    what=what,
                )
            )
            if show and verdict is not Verdict.SAME:
                print(f"{turn.session} turn {turn.turn}, token {position}: {verdict.value}: {what}", flush=True)
    finally:
        client.close()
    return found


def is_right(found: Sequence[Comparison]) -> bool:
    """Whether every turn said the same, but for a hundredth of ties."""
    ties = sum(each.verdict is Verdict.TIE for each in found)
    others = sum(each.verdict in (Verdict.DIFFERENT, Verdict.UNANSWERED) for each in found)
    return not others and ties <= MOST_TIES * len(found)
