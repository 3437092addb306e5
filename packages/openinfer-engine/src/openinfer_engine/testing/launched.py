"""A family's engine as its users have it: launched through the family, asked, and closed."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from openinfer_core import EngineHandle, FinishReason, GenerateRequest, ModelFamily, RequestId, SamplingParams
from openinfer_engine.options import EngineOptions
from openinfer_engine.testing.answers import Answer
from openinfer_engine.testing.golden import Golden

_RECORDED = "1"
"""The sequence of a `Golden` that an engine is asked to go on with."""


def ask_launched(
    family: ModelFamily,
    model_dir: Path,
    options: EngineOptions,
    prompt_token_ids: Sequence[int],
    *,
    max_tokens: int = 1,
    logprobs: int | None = None,
) -> Answer:
    """What an engine that the family launches answers greedily to one request.

    Raises:
        AssertionError: the request failed.
        OpenInferError: what `launch` raises.
    """
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0, logprobs=logprobs)
    request = GenerateRequest(request_id=RequestId(7), prompt_token_ids=tuple(prompt_token_ids), sampling=sampling)
    return asyncio.run(_ask(family.launch(model_dir, options), request))


async def _ask(engine: EngineHandle, request: GenerateRequest) -> Answer:
    answer = Answer()
    try:
        engine.submit(request)
        async for events in engine.events():
            for event in events:
                answer.take(event)
            if answer.finished is not None:
                break
    finally:
        await engine.close()
    return answer


def check_launched(family: ModelFamily, model_dir: Path, options: EngineOptions, *, tolerance: float) -> None:
    """A launched engine goes on with a recorded sequence by the token that the reference finds likeliest.

    Args:
        family: launches it.
        model_dir: a model with a `Golden`.
        options: of the engine.
        tolerance: largest difference of the log-probability.

    Raises:
        AssertionError: it says something else, or ends otherwise than after this token.
    """
    golden = Golden(model_dir)
    prompt, _, recorded = golden.sequences[_RECORDED]
    logits = recorded[-1].astype(np.float64)
    answer = ask_launched(family, model_dir, options, prompt, logprobs=0)
    assert answer.token_ids == [int(logits.argmax())], answer.token_ids
    expected = logits.max() - np.log(np.exp(logits).sum())
    (said,) = answer.logprobs
    assert abs(said.logprob - expected) < tolerance, f"log-probability {said.logprob}, recorded {expected}"
    finished = answer.finished
    assert finished is not None, "the engine ended before the request"
    assert (finished.reason, finished.prompt_tokens) == (FinishReason.LENGTH, len(prompt)), finished
