"""`Counters`: what a scheduler has done since it was made."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Counters:
    """Totals, meaning what the fields of `EngineStats` of the same names mean."""

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    wasted_rows: int = 0
    failed_requests: int = 0
    drafts: int = 0
    """Rows whose drafts were compared."""
    draft_tokens: int = 0
    accepted_tokens_per_pos: list[int] = field(default_factory=list[int])

    def count_drafts(self, num_drafts: int, num_accepted: int) -> None:
        self.drafts += 1
        self.draft_tokens += num_drafts
        for position in range(num_accepted):
            self.accepted_tokens_per_pos[position] += 1
