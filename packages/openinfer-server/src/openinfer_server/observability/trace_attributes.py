"""What the span of an engine request says, in the terms of OpenTelemetry's GenAI conventions, and its phases."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from openinfer_core.events import FailureKind, FinishReason
from openinfer_core.sampling import SamplingParams

if TYPE_CHECKING:
    from openinfer_server.output.response import Choice


def sampling_attributes(sampling: SamplingParams) -> dict[str, int | float]:
    """What was asked of the sampler."""
    attributes: dict[str, int | float] = {
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
    }
    if sampling.top_k:
        attributes["gen_ai.request.top_k"] = sampling.top_k
    if sampling.seed is not None and sampling.seed < 2**63:  # attributes are signed
        attributes["gen_ai.request.seed"] = sampling.seed
    return attributes


def phases(choice: "Choice", now_s: float) -> Iterator[tuple[str, float, float]]:
    """Name, begin and end of each phase that the request reached."""
    if choice.queued_s is None:
        yield "queue", choice.submitted_s, now_s
        return
    scheduled_s = choice.submitted_s + choice.queued_s
    yield "queue", choice.submitted_s, scheduled_s
    if not choice.first_token_s:
        yield "prefill", scheduled_s, max(scheduled_s, now_s)
        return
    yield "prefill", scheduled_s, max(scheduled_s, choice.first_token_s)
    yield "decode", choice.first_token_s, now_s


def outcome_attributes(choice: "Choice", outcome: FinishReason | FailureKind) -> Iterator[tuple[str, Any]]:
    """What is known of a request that has ended."""
    yield "gen_ai.usage.cache_read.input_tokens", choice.cached_tokens
    if choice.first_token_s:
        yield "gen_ai.response.time_to_first_chunk", choice.first_token_s - choice.submitted_s
    if isinstance(outcome, FailureKind):
        yield "error.type", str(outcome)
        return
    yield "gen_ai.response.finish_reasons", (str(outcome),)
    if outcome is not FinishReason.ABORT:
        yield "gen_ai.usage.output_tokens", choice.completion_tokens
