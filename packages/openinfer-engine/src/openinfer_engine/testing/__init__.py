"""For tests of packages that bring a model family: step by step without an engine, and in traffic through one."""

from openinfer_engine.testing.answers import (
    Answer,
    prompt_differences,
    run_alone,
    run_at_once,
    run_together,
    top_differences,
)
from openinfer_engine.testing.drafted_steps import DraftedAnswer, DraftedSizes, DraftedSteps
from openinfer_engine.testing.drafters import (
    DraftKind,
    ScriptedDrafter,
    scripted_drafter,
    with_drafter,
    with_scripted_drafts,
)
from openinfer_engine.testing.drafts import check_drafts, check_drafts_in_traffic, drafted_requests
from openinfer_engine.testing.family import FamilyHarness, check_family, check_steps, step_at_random
from openinfer_engine.testing.golden import Golden, record_golden
from openinfer_engine.testing.launched import ask_launched, check_launched
from openinfer_engine.testing.model_drafters import (
    DraftedContext,
    DraftLog,
    RecordingFactory,
    accepted_share,
    agreeing_logits,
    check_model_drafter,
    drafts_after_prefixes,
    make_drafting_loop,
    record_drafts,
)
from openinfer_engine.testing.quantised_family import check_quantised
from openinfer_engine.testing.random_weights import bf16_exact, random_weights
from openinfer_engine.testing.rank_hosts import check_rank_host
from openinfer_engine.testing.recorded import RecordedModel
from openinfer_engine.testing.recorded_drafts import check_greedy_drafts, check_recorded_drafts
from openinfer_engine.testing.rounding import (
    Distance,
    QueriesOneOff,
    RoundedOps,
    answered_logprobs,
    computed_logprobs,
)
from openinfer_engine.testing.traffic import Traffic, random_requests

__all__ = [
    "Answer",
    "Distance",
    "DraftKind",
    "DraftLog",
    "DraftedAnswer",
    "DraftedContext",
    "DraftedSizes",
    "DraftedSteps",
    "FamilyHarness",
    "Golden",
    "QueriesOneOff",
    "RecordedModel",
    "RecordingFactory",
    "RoundedOps",
    "ScriptedDrafter",
    "Traffic",
    "accepted_share",
    "agreeing_logits",
    "answered_logprobs",
    "ask_launched",
    "bf16_exact",
    "check_drafts",
    "check_drafts_in_traffic",
    "check_family",
    "check_greedy_drafts",
    "check_launched",
    "check_model_drafter",
    "check_quantised",
    "check_rank_host",
    "check_recorded_drafts",
    "check_steps",
    "computed_logprobs",
    "drafted_requests",
    "drafts_after_prefixes",
    "make_drafting_loop",
    "prompt_differences",
    "random_requests",
    "random_weights",
    "record_drafts",
    "record_golden",
    "run_alone",
    "run_at_once",
    "run_together",
    "scripted_drafter",
    "step_at_random",
    "top_differences",
    "with_drafter",
    "with_scripted_drafts",
]
