"""`Counters`: what a scheduler has done since it was made."""

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Totals, meaning what the fields of `EngineStats` of the same names mean."""

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    share_preemptions: int = 0
    share_rows_sat_out: int = 0
    protected_blocks: int = 0  # at the last plan while requests waited
    tenants: int = 0  # at the last plan
    wasted_rows: int = 0
    failed_requests: int = 0
