"""Tokens of an answer, counted over its choices."""

from collections.abc import Sequence

import msgspec

from openinfer_server.openai.objects import CompletionTokensDetails, PromptTokensDetails, Usage
from openinfer_server.output.response import Choice


def usage_of(choices: Sequence[Choice], n: int, *, has_prediction: bool = False) -> Usage:
    """Tokens of an answer; choices of one prompt share its tokens, and the first one says what was cached."""
    firsts = choices[::n]
    prompt_tokens = sum(choice.prompt_tokens for choice in firsts)
    completion_tokens = sum(choice.completion_tokens for choice in choices)
    cached = PromptTokensDetails(sum(choice.cached_tokens for choice in firsts))
    details = CompletionTokensDetails(sum(choice.reasoning_tokens for choice in choices))
    if has_prediction:
        details = msgspec.structs.replace(
            details,
            accepted_prediction_tokens=sum(choice.accepted_drafts for choice in choices),
            rejected_prediction_tokens=sum(choice.rejected_drafts for choice in choices),
        )
    return Usage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, cached, details)
