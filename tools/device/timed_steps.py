"""Times of decode steps of an engine without a server, whatever ranks it has."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from openinfer_core import Failed, GenerateRequest, RequestId, SamplingParams, TokenEvent, Tokens
from openinfer_core.process.host import EngineLoop

TIMED_STEPS = 64


def timed(loop: EngineLoop, *, batch: int, prompt: int) -> dict[str, Any]:
    """Times of so many requests at once, of which all have their first tokens when the clock is started.

    Ranks have as many requests as the router gives them, so steps need not have all rows' tokens: tokens are counted.
    """
    rng = np.random.default_rng(batch)
    counts: dict[RequestId, int] = {}
    sampling = SamplingParams(max_tokens=1000, temperature=0.0)
    begin_s = time.perf_counter()
    for index in range(batch):
        ids = tuple(rng.integers(0, loop.info.num_token_ids, prompt).tolist())
        request = GenerateRequest(request_id=RequestId(index), prompt_token_ids=ids, sampling=sampling)
        counts[request.request_id] = 0
        count(loop.submit(request), counts)
    while not all(counts.values()):
        count(loop.step(), counts)
    first_s, before = time.perf_counter(), sum(counts.values())
    for _ in range(TIMED_STEPS):
        count(loop.step(), counts)
    took_s, tokens = time.perf_counter() - first_s, sum(counts.values()) - before
    for request_id in counts:
        loop.abort(request_id)
    while loop.busy:
        loop.step()
    return {
        "rows": batch,
        "prompt": prompt,
        "tpot_ms": took_s * 1e3 / TIMED_STEPS,
        "prefill_s": first_s - begin_s,
        "tokens": tokens,
        "tokens_per_s": round(tokens / took_s),
    }


def count(events: Sequence[TokenEvent], counts: dict[RequestId, int]) -> None:
    for event in events:
        if isinstance(event, Tokens):
            counts[event.request_id] += len(event.token_ids)
        elif isinstance(event, Failed):
            raise RuntimeError(event.message)
