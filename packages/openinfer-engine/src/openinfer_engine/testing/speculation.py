"""Random requests of every kind, answered with speculation as without, bit for bit.

The reference is an engine without a drafter, a prefix cache or a shortage of anything; the engine with one is given
what the case says: small budgets, few blocks, tiers, ranks. Both need batch-invariant operators.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
import numpy as np

from openinfer_core import GenerateRequest, Grammar, RequestId, SamplingParams
from openinfer_engine.engine_plan import EnginePlan
from openinfer_engine.launch import build_loop
from openinfer_engine.testing.answers import Answer, run_together

_MOST_PROMPT_TOKENS = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationCounts:
    """What happened in the engine with speculation while it answered as the one without."""

    requests: int = 0
    tokens: int = 0
    drafts: int = 0
    accepted: int = 0
    preemptions: int = 0
    cached_tokens: int = 0
    tier_tokens: int = 0

    def __add__(self, other: "SpeculationCounts") -> "SpeculationCounts":
        both = asdict(other)
        return SpeculationCounts(**{name: value + both[name] for name, value in asdict(self).items()})


def mixed_requests(
    num_token_ids: int,
    *,
    count: int,
    seed: int,
    grammars: Sequence[Grammar] = (),
    stop_token_id: int | None = None,
    length: int = 1,
) -> list[GenerateRequest]:
    """Requests that repeat themselves, of all kinds of sampling, with grammars, restrictions and predictions.

    Args:
        num_token_ids: of the model.
        count: how many; their ids are 0, 1 and so on.
        seed: of all at random.
        grammars: of every tenth request, one after the other.
        stop_token_id: of requests with a grammar.
        length: how many times as long prompts and answers are: of up to 48 and 27 tokens, 40 with a grammar.
    """
    rng = np.random.default_rng(seed)
    shared: list[list[int]] = [rng.integers(0, num_token_ids, 24 * length).tolist() for _ in range(3)]
    requests: list[GenerateRequest] = []
    for index in range(count):
        some: list[int] = rng.integers(0, num_token_ids, length * int(rng.integers(1, 9))).tolist()
        prompt = shared[index % 3] * (index % 4 > 0) + some * int(rng.integers(1, 4))
        fields = _sampling(rng, num_token_ids, index)
        fields["max_tokens"] *= length
        if grammars and index % 10 == 9:
            fields |= {"grammar": grammars[index // 10 % len(grammars)], "min_tokens": 0}
            fields |= {"stop_token_ids": () if stop_token_id is None else (stop_token_id,), "max_tokens": 40}
        prediction = tuple(prompt[len(prompt) // 2 :] + some) if index % 7 == 3 else ()
        requests.append(
            GenerateRequest(
                request_id=RequestId(index),
                prompt_token_ids=tuple(prompt[-_MOST_PROMPT_TOKENS * length :]),
                sampling=SamplingParams(**fields, seed=int(rng.integers(0, 1 << 31))),
                prediction_token_ids=prediction,
            )
        )
    return requests


def _sampling(rng: np.random.Generator, num_token_ids: int, index: int) -> dict[str, Any]:
    some: list[int] = rng.permutation(num_token_ids)[:60].tolist()
    fields: dict[str, Any] = {
        "max_tokens": int(rng.integers(1, 28)),
        "temperature": (0.0, 0.0, 0.3, 1.0)[int(rng.integers(0, 4))],
    }
    if rng.random() < 0.4:
        fields |= {"top_p": 0.9, "top_k": int(rng.integers(1, 40)), "min_p": (0.0, 0.05)[int(rng.integers(0, 2))]}
    if rng.random() < 0.3:
        fields |= {"presence_penalty": 0.5, "frequency_penalty": 0.4, "repetition_penalty": 1.1}
    if rng.random() < 0.3:  # likely, so that answers repeat themselves
        fields |= {"logit_bias": {token: float(rng.normal(4, 2)) for token in some[:6]}}
    if rng.random() < 0.3:
        least = int(rng.integers(0, 8))
        fields |= {"stop_token_ids": tuple(some[:30]), "min_tokens": min(least, fields["max_tokens"])}
    if rng.random() < 0.3:
        fields |= {"logprobs": int(rng.integers(0, 4)), "prompt_logprobs": 1 if index % 5 == 0 else None}
    if index % 10 == 4:
        fields |= {"allowed_token_ids": tuple(sorted(some[:8])), "stop_token_ids": (), "min_tokens": 0}
    if index % 10 == 6:
        fields |= {"bad_words": ((some[0],), (some[1], some[2]))}
    return fields


def check_on_is_off(
    off: EnginePlan,
    make_on: Callable[[Mapping[int, Sequence[int]]], EnginePlan],
    requests: Sequence[GenerateRequest],
    *,
    seed: int,
) -> SpeculationCounts:
    """Answers requests without and with speculation.

    Args:
        off: the engine without; with room for everything.
        make_on: the engine with, given what each request is answered, by its id.
        requests: with seeds.
        seed: of the order in which they arrive.

    Raises:
        AssertionError: an answer differs, a request failed, a drafter raised, or something was not given back.
    """
    # Predictions change no answer, and an engine without a drafter refuses them.
    plain = [msgspec.structs.replace(request, prediction_token_ids=()) for request in requests]
    expected, _ = _answers(off, plain, seed=seed)
    on = make_on({request_id: _sampled(answer) for request_id, answer in expected.items()})
    if on.drafter is None or not on.drafter.takes_predictions:
        requests = plain
    found, stats = _answers(on, requests, seed=seed + 1)
    for request_id, answer in expected.items():
        others = found[request_id]
        assert others.token_ids == answer.token_ids, f"seed {seed}, request {request_id}"
        assert others.logprobs == answer.logprobs, f"seed {seed}, request {request_id}: log-probabilities"
        assert others.prompt_logprobs == answer.prompt_logprobs, f"seed {seed}, request {request_id}: of the prompt"
        assert others.finished is not None
        assert answer.finished is not None
        assert (others.finished.reason, others.finished.stop_token_id, others.finished.completion_tokens) == (
            answer.finished.reason,
            answer.finished.stop_token_id,
            answer.finished.completion_tokens,
        ), f"seed {seed}, request {request_id}: its end"
    assert stats.drafter_faults == 0, "the drafter raised"
    assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0), stats
    return SpeculationCounts(
        requests=len(requests),
        tokens=sum(len(answer.token_ids) for answer in expected.values()),
        drafts=stats.spec_decode_num_draft_tokens,
        accepted=stats.spec_decode_num_accepted_tokens,
        preemptions=stats.preemptions,
        cached_tokens=stats.cached_tokens,
        tier_tokens=stats.tier_tokens,
    )


def _answers(
    engine_plan: EnginePlan, requests: Sequence[GenerateRequest], *, seed: int
) -> tuple[dict[int, Answer], Any]:
    loop = build_loop(engine_plan)
    try:
        answers = run_together(loop, requests, seed=seed)
        return answers, loop.stats()
    finally:
        loop.close()


def _sampled(answer: Answer) -> list[int]:
    assert answer.finished is not None
    stop = answer.finished.stop_token_id
    return answer.token_ids if stop is None else [*answer.token_ids, stop]
