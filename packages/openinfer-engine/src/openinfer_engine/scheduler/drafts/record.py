"""`DraftRecord`: what became of drafts, of one sequence or of all, and when a sequence is to have some again.

Recent drafts count more, and a run that is unlikely outweighs what was before it: drafts that are refused one step
after the other where most were accepted, or accepted where most were refused, are those of another text than before.
"""

from dataclasses import dataclass

RETRY_TOKENS, MOST_RETRY_TOKENS = 8, 64
"""Tokens of a sequence without drafts before some are tried; of one whose tries fail, each time twice as many."""
_DECAY = 0.95
_UNLIKELY, _KEPT = 0.005, 0.25
_TRIED_WEIGHT = 2.0  # of what was before, once drafts turn out right that were tried
_MOST_SHARE = 0.999


@dataclass(slots=True)
class DraftRecord:
    """Drafts that were accepted, and rows that ended with a refused one, recent ones counting more."""

    accepted: float = 0.0
    refused: float = 0.0
    run: int = 0
    """Drafts accepted since the last refused one, or rows since the last accepted one, as a negative number."""
    retry_tokens: int = 0
    """Known tokens of the sequence from which on drafts are tried."""
    wait_tokens: int = RETRY_TOKENS
    is_tried: bool = False
    """Whether its last drafts were."""

    def share(self, first: float, *, weight: float = 4.0) -> float:
        """That is accepted; `first` before anything is known, which counts as much as so many drafts."""
        known = self.accepted + self.refused
        return min((self.accepted + weight * first) / (known + weight), _MOST_SHARE)

    def note(self, *, planned: int, accepted: int, share: float | None = None) -> None:
        """Takes in a row's drafts; `share` is what was expected of them, None for runs that mean nothing."""
        is_refused = accepted < planned
        if accepted and self.is_tried:
            kept = _TRIED_WEIGHT / max(self.accepted + self.refused, _TRIED_WEIGHT)
            self.accepted, self.refused = kept * self.accepted, kept * self.refused
        # A string of drafts that are accepted, or of rows whose first one is refused.
        run = (max(0, self.run) + accepted) if accepted else min(0, self.run) - 1
        chance = 1.0 if share is None else share**run if run > 0 else (1.0 - share) ** -run
        if chance < _UNLIKELY:  # most of what was before is forgotten, and the run counts whole
            self.accepted = _KEPT * self.accepted + max(accepted, run)
            self.refused = _KEPT * self.refused + max(is_refused, -run)
            run = 0
        else:
            self.accepted = _DECAY * self.accepted + accepted
            self.refused = _DECAY * self.refused + is_refused
        self.run = 0 if run > 0 and is_refused else run
        if accepted:
            self.wait_tokens = RETRY_TOKENS
            if self.is_tried:
                self.retry_tokens = 0  # further ones are tried at once

    def is_due(self, known_tokens: int, *, soon: bool = False) -> bool:
        return known_tokens + (self.wait_tokens // 2 if soon else 0) >= self.retry_tokens

    def note_planned(self, known_tokens: int, *, is_tried: bool) -> None:
        """The sequence has drafts in a step; without further ones they are tried again after a while."""
        self.retry_tokens, self.is_tried = known_tokens + self.wait_tokens, is_tried
        if is_tried:
            self.wait_tokens = min(2 * self.wait_tokens, MOST_RETRY_TOKENS)
