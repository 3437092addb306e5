"""`FakeDrafter`: a drafter whose guesses follow a script, so that what a plan makes of them is known."""

import random
from collections.abc import Sequence
from enum import StrEnum

from openinfer_core.request import GenerateRequest
from openinfer_core.testing import fake_model

_BEYOND = (-1, 2**31 - 1, fake_model.NUM_TOKEN_IDS)  # ids that the fake model does not have


class DraftScript(StrEnum):
    """How good a fake drafter's guesses are."""

    RIGHT = "right"  # every draft is what the model samples
    WRONG = "wrong"  # the first draft is never what the model samples
    MIX = "mix"  # some of both, and sometimes fewer than there is room for
    HOSTILE = "hostile"  # none, fewer or more than there is room for, and ids that no model has


class FakeDrafter:
    """Drafts are a function of what was generated so far, so two runs agree.

    Args:
        script: how good they are.
        max_drafts: how many there is room for; `HOSTILE` does not keep to it.
        acceptance: the probability with which each draft of `RIGHT` is right.
    """

    def __init__(self, script: DraftScript, *, max_drafts: int, acceptance: float = 1.0) -> None:
        self._script = script
        self._max_drafts = max_drafts
        self._acceptance = acceptance

    def draft(self, request: GenerateRequest, state: int, *, num_outputs: int) -> list[int]:
        """Drafts that follow a request's last token.

        Args:
            request: the request.
            state: the fake model's after that token.
            num_outputs: tokens sampled so far, that one included.
        """
        mixed = fake_model.extend(state, 1)  # bits that the model does not draw its token from
        match self._script:
            case DraftScript.RIGHT:
                return self._rated(_right(request, state, num_outputs, self._max_drafts), state)
            case DraftScript.WRONG:
                return [_other(token_id) for token_id in _right(request, state, num_outputs, self._max_drafts)]
            case DraftScript.MIX:
                return self._mix(_right(request, state, num_outputs, self._max_drafts), mixed)
            case DraftScript.HOSTILE:
                return self._hostile(_right(request, state, num_outputs, self._max_drafts + 3), mixed)

    def _mix(self, right: Sequence[int], mixed: int) -> list[int]:
        # Each draft is right three times in four; one time in eight the last half is missing.
        drafts = [token_id if mixed >> 2 * i & 3 else _other(token_id) for i, token_id in enumerate(right)]
        return drafts if mixed >> 40 & 7 else drafts[: len(drafts) // 2]

    def _rated(self, right: Sequence[int], state: int) -> list[int]:
        rng = random.Random(state)  # noqa: S311
        return [token_id if rng.random() < self._acceptance else _other(token_id) for token_id in right]

    def _hostile(self, right: Sequence[int], mixed: int) -> list[int]:
        drafts = list(right)
        match mixed >> 3 & 7:
            case 0:
                return []
            case 1 | 2:
                return drafts[: mixed >> 8 & 1]
            case 3 | 4:
                drafts[mixed >> 8 & 1] = _BEYOND[mixed % len(_BEYOND)]
                return drafts
            case 5:
                return [_BEYOND[mixed % len(_BEYOND)]] * len(drafts)
            case _:
                return drafts


def _right(request: GenerateRequest, state: int, num_outputs: int, num_drafts: int) -> list[int]:
    token_ids: list[int] = []
    for index in range(num_drafts):
        token_ids.append(fake_model.next_token(request, state, num_outputs=num_outputs + index))
        state = fake_model.extend(state, token_ids[-1])
    return token_ids


def _other(token_id: int) -> int:
    return (token_id + 1) % fake_model.NUM_TOKEN_IDS
