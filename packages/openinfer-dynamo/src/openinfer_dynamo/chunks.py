"""The engine's events as chunks of Dynamo's stream (`dynamo.common.backend.engine.GenerateChunk`, ai-dynamo 1.6.1).

A chunk has `token_ids` and `index`; the last one, and no other, has `finish_reason`.
"""

import math
from typing import Any

from openinfer_core import Finished, FinishReason, TokenLogprobs, Tokens

CANCELLED = "cancelled"
_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.ABORT: CANCELLED}
_LEAST_LOGPROB = -9999.0  # JSON has no infinity: what a forbidden token gets

Chunk = dict[str, Any]


def chunk_of(event: Tokens) -> Chunk:
    """New tokens, with their log-probabilities if they were asked for; the frontend finds the tokens' texts."""
    chunk: Chunk = {"token_ids": list(event.token_ids), "index": 0}
    if event.logprobs is not None:
        pairs = list(zip(event.token_ids, event.logprobs, strict=True))
        chunk["log_probs"] = [_finite(logprobs.logprob) for _, logprobs in pairs]
        if any(logprobs.top_ids for _, logprobs in pairs):
            chunk["top_logprobs"] = [_alternatives(logprobs) for _, logprobs in pairs]
    return chunk


def last_chunk(event: Finished, prompt_logprobs: list[Any] | None = None) -> Chunk:
    """The end of a stream: why, how many tokens, and where the KV was left if it was to be.

    Args:
        event: the engine's.
        prompt_logprobs: one entry per prompt token, None without any.
    """
    usage: dict[str, Any] = {
        "prompt_tokens": event.prompt_tokens,
        "completion_tokens": event.completion_tokens,
        "total_tokens": event.prompt_tokens + event.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": event.cached_tokens},
    }
    chunk: Chunk = {"token_ids": [], "index": 0, "finish_reason": _REASONS[event.reason], "completion_usage": usage}
    if event.transfer is not None:
        chunk["disaggregated_params"] = event.transfer
    if prompt_logprobs is not None:
        chunk["engine_data"] = {"prompt_logprobs": prompt_logprobs}
    return chunk


def cancelled_chunk(num_prompt_tokens: int) -> Chunk:
    """The end of a stream that was stopped before the engine knew of it."""
    usage = {"prompt_tokens": num_prompt_tokens, "completion_tokens": 0, "total_tokens": num_prompt_tokens}
    return {"token_ids": [], "index": 0, "finish_reason": CANCELLED, "completion_usage": usage}


def prompt_entry(token_id: int, logprobs: TokenLogprobs) -> dict[str, Any]:
    """One place of a prompt: token ids as text, since JSON's keys are (`PromptLogprobEntry`)."""
    entry: dict[str, Any] = {
        str(top_id): {"logprob": _finite(logprob), "rank": rank}
        for rank, (top_id, logprob) in enumerate(zip(logprobs.top_ids, logprobs.top_logprobs, strict=True), 1)
    }
    entry[str(token_id)] = {"logprob": _finite(logprobs.logprob), "rank": logprobs.rank}
    return entry


def _alternatives(logprobs: TokenLogprobs) -> list[dict[str, Any]]:
    return [
        {"rank": rank, "token_id": token_id, "token": None, "logprob": _finite(logprob)}
        for rank, (token_id, logprob) in enumerate(zip(logprobs.top_ids, logprobs.top_logprobs, strict=True), 1)
    ]


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LEAST_LOGPROB
