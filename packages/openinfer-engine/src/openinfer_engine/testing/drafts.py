"""What a model answers with drafts is what it answers without, bit for bit, whatever is drafted and however it is cut.

`check_drafts` needs operators that give a token the same bits in every batch (`EngineOptions.batch_invariant`). It
drives a runner by `DraftedSteps`, with all that a request may ask of its sampling.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from openinfer_core import EngineStats, GenerateRequest, RequestId, SamplingParams
from openinfer_engine.distributed.communicator import Communicator, SoloCommunicator
from openinfer_engine.distributed.local_group import LocalGroup
from openinfer_engine.engine_plan import EnginePlan, resolve
from openinfer_engine.launch import build_loop
from openinfer_engine.model import ModelDefinition
from openinfer_engine.options import EngineOptions
from openinfer_engine.testing.answers import Answer, run_alone, run_together
from openinfer_engine.testing.drafted_steps import AllowedTokens, DraftedAnswer, DraftedSizes, DraftedSteps
from openinfer_engine.testing.drafters import DraftKind, scripted_drafter, with_drafter
from openinfer_engine.tracing.trace import NoTrace
from openinfer_engine.weights.loading import load_workers
from openinfer_engine.worker.runner import ThreadRunner

_MAX_MODEL_TOKENS = 120
_MAX_DRAFTS = 4
_ACCEPTED = {DraftKind.RIGHT: 0.5, DraftKind.WRONG: 0.0, DraftKind.RANDOM: 0.1, DraftKind.HOSTILE: 0.1}
"""Shares of what is compared, host drafts included, that are accepted at least."""


def check_drafts(
    definition: ModelDefinition[Any],
    model_dir: Path,
    *,
    kinds: Sequence[DraftKind] = tuple(DraftKind),
    seeds: Sequence[int] = (0, 1),
    **options: Any,
) -> None:
    """Requests of every kind are answered as without drafts, by each drafter, in steps at random.

    Args:
        definition: of the family.
        model_dir: `config.json` and safetensors.
        kinds: drafters.
        seeds: of steps, one run for each and drafter.
        options: fields of `EngineOptions`, such as `tensor_parallel_size`.

    Raises:
        AssertionError: an answer differs, a drafter was told something wrong, or little was accepted.
    """
    sizes: dict[str, Any] = {
        "max_num_seqs": 5,
        "max_step_tokens": 512,
        "block_size_tokens": 8,
        "num_blocks": 80,
        "max_model_tokens": _MAX_MODEL_TOKENS,
        "batch_invariant": True,
    }
    engine_plan = resolve(definition, model_dir, EngineOptions(**sizes | options))
    requests = drafted_requests(engine_plan.worker_limits.num_token_ids)
    expected = _run(engine_plan, requests, seed=0, outputs={})[0]
    _check_varied(expected)
    outputs = {request_id: answer.token_ids for request_id, answer in expected.items()}
    for kind in kinds:
        for seed in seeds:
            _check_run(engine_plan, requests, kind=kind, seed=seed, outputs=outputs, expected=expected)


def check_drafts_in_traffic(
    definition: ModelDefinition[Any],
    model_dir: Path,
    *,
    kinds: Sequence[DraftKind] = (DraftKind.RIGHT, DraftKind.HOSTILE),
    **options: Any,
) -> list[EngineStats]:
    """The same through the real scheduler and loop: requests arrive together, twice, others are aborted next to them.

    Args:
        definition: of the family.
        model_dir: `config.json` and safetensors.
        kinds: drafters.
        options: fields of `EngineOptions`, of the engine with drafts alone: small budgets, few blocks, tiers, ranks.

    Returns:
        Counts of the engines with drafts, one for each kind.

    Raises:
        AssertionError: an answer differs, a drafter was told something wrong, or nothing was compared.
    """
    sizes: dict[str, Any] = {
        "max_num_seqs": 6,
        "max_step_tokens": 256,
        "block_size_tokens": 8,
        "num_blocks": 200,
        "batch_invariant": True,
    }
    ranks = {"tensor_parallel_size": options.get("tensor_parallel_size", 1)}  # a sum over ranks has bits of its own
    alone = build_loop(resolve(definition, model_dir, EngineOptions(**sizes, **ranks, prefix_cache=False)))
    requests = drafted_requests(alone.info.num_token_ids, shared_tokens=40)
    expected = run_alone(alone, requests)
    alone.close()
    outputs = {request_id: _output(answer) for request_id, answer in expected.items()}
    counts: list[EngineStats] = []
    for kind in kinds:
        engine_plan = resolve(definition, model_dir, EngineOptions(**sizes | options))
        loop = build_loop(with_drafter(engine_plan, scripted_drafter(kind, outputs), max_drafts=_MAX_DRAFTS))
        try:
            rounds = [run_together(loop, requests, seed=seed) for seed in range(2)]
            counts.append(stats := loop.stats())
        finally:
            loop.close()
        for found in rounds:
            for request_id, answer in expected.items():
                _check_answer(found[request_id], answer, name=f"drafter {kind}, request {request_id}")
        assert stats.drafter_faults == 0, f"drafter {kind} raised: it was told something wrong"
        assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0), stats
        assert stats.spec_decode_num_draft_tokens > 50, f"drafter {kind}: few drafts were compared"
        share = stats.spec_decode_num_accepted_tokens / stats.spec_decode_num_draft_tokens
        assert share >= _ACCEPTED[kind], f"drafter {kind}: {share:.0%} of the drafts were accepted"
    return counts


def drafted_requests(num_token_ids: int, *, count: int = 10, shared_tokens: int = 0) -> list[GenerateRequest]:
    """Requests that ask for what sampling must do at each position of a row: seeds, penalties, bias, ends, scores.

    Args:
        num_token_ids: of the model.
        count: how many; their ids are 0, 1 and so on.
        shared_tokens: with how many all prompts begin alike.
    """
    rng = np.random.default_rng(11)
    shared: list[int] = rng.integers(0, num_token_ids, shared_tokens).tolist()
    requests: list[GenerateRequest] = []
    for index in range(count):
        prompt: list[int] = shared + rng.integers(0, num_token_ids, int(rng.integers(1, 60))).tolist()
        some: list[int] = rng.permutation(num_token_ids)[:40].tolist()
        sampling: dict[str, Any] = {
            "max_tokens": int(rng.integers(8, 40)),
            "temperature": (0.0, 1.0, 0.7)[index % 3],
            "seed": index,
        }
        if index % 2:
            sampling |= {"top_p": 0.9, "top_k": 30}
        if index % 4 in (1, 2):
            sampling |= {"presence_penalty": 0.5, "frequency_penalty": 0.7, "repetition_penalty": 1.2}
        if index % 5 in (0, 3):
            sampling |= {"logit_bias": {token: float(rng.normal()) for token in some[:10]}}
        if index % 3 == 1:  # likely to end within a row, and not before `min_tokens`
            sampling |= {"stop_token_ids": tuple(some), "min_tokens": int(rng.integers(1, 9))}
        if index % 3 != 2:
            sampling |= {"logprobs": index % 4, "prompt_logprobs": 1 if index % 2 else None}
        requests.append(
            GenerateRequest(
                request_id=RequestId(index), prompt_token_ids=tuple(prompt), sampling=SamplingParams(**sampling)
            )
        )
    return requests


def every_third_token_masked(
    request: GenerateRequest, output: Sequence[int], *, num_token_ids: int
) -> list[int] | None:
    """A grammar of sorts, of every third request: which tokens may come depends on the last one."""
    if request.request_id % 3 != 2:
        return None
    last = output[-1] if output else 0
    return [token for token in range(num_token_ids) if (token + last) % 3]


def _check_run(
    engine_plan: EnginePlan,
    requests: Sequence[GenerateRequest],
    *,
    kind: DraftKind,
    seed: int,
    outputs: Mapping[int, Sequence[int]],
    expected: Mapping[int, DraftedAnswer],
) -> None:
    drafting = with_drafter(engine_plan, scripted_drafter(kind, outputs, seed=seed), max_drafts=_MAX_DRAFTS)
    assert drafting.drafter is not None
    found, steps = _run(drafting, requests, seed=seed, outputs=outputs)
    name = f"drafter {kind}, seed {seed}"
    assert drafting.drafter.faults.count == 0, f"{name} raised: it was told something wrong"
    for request_id, answer in expected.items():
        assert found[request_id].token_ids == answer.token_ids, f"{name}, request {request_id}"
        assert found[request_id] == answer, f"{name}, request {request_id}: log-probabilities"
    share = steps.num_accepted / steps.num_compared
    assert steps.num_compared > 50, f"{name}: {steps.num_compared} drafts were compared"
    assert share >= _ACCEPTED[kind], f"{name}: {share:.0%} of the drafts were accepted"
    assert steps.num_preemptions > 0, f"{name}: nothing was preempted"
    assert steps.num_empty > 0, f"{name}: no step was without rows"


def run_drafted_steps(
    engine_plan: EnginePlan,
    requests: Sequence[GenerateRequest],
    *,
    seed: int,
    outputs: Mapping[int, Sequence[int]],
    allowed: AllowedTokens,
) -> tuple[dict[int, DraftedAnswer], DraftedSteps]:
    """Answers of an engine's workers, without its scheduler, and the steps that they took."""
    options, limits = engine_plan.options, engine_plan.worker_limits
    size = options.tensor_parallel_size
    communicators: Sequence[Communicator] = [SoloCommunicator()] if size == 1 else LocalGroup(size).communicators
    runner = ThreadRunner(load_workers(engine_plan, communicators, NoTrace()))
    sizes = DraftedSizes(
        num_blocks=engine_plan.num_blocks,
        block_size_tokens=options.block_size_tokens,
        max_num_seqs=options.max_num_seqs,
        max_model_tokens=limits.max_model_tokens,
        num_token_ids=limits.num_token_ids,
    )
    steps = DraftedSteps(
        runner,
        sizes,
        seed=seed,
        max_drafts=0 if engine_plan.drafter is None else engine_plan.drafter.max_drafts,
        outputs=outputs,
        allowed=allowed,
    )
    try:
        return steps.run(requests), steps
    finally:
        runner.close()


def _run(
    engine_plan: EnginePlan, requests: Sequence[GenerateRequest], *, seed: int, outputs: Mapping[int, Sequence[int]]
) -> tuple[dict[int, DraftedAnswer], DraftedSteps]:
    allowed = partial(every_third_token_masked, num_token_ids=engine_plan.worker_limits.num_token_ids)
    return run_drafted_steps(engine_plan, requests, seed=seed, outputs=outputs, allowed=allowed)


def _check_varied(answers: Mapping[int, DraftedAnswer]) -> None:
    lengths = [len(answer.token_ids) for answer in answers.values()]
    assert sum(lengths) > 100, f"answers of {lengths} tokens are short"
    assert len({token for answer in answers.values() for token in answer.token_ids}) > 30, "few tokens differ"


def _output(answer: Answer) -> list[int]:
    """What was sampled, the stop token included."""
    assert answer.finished is not None
    stop = answer.finished.stop_token_id
    return answer.token_ids if stop is None else [*answer.token_ids, stop]


def _check_answer(found: Answer, expected: Answer, *, name: str) -> None:
    assert found.finished is not None, f"{name} has not ended"
    assert expected.finished is not None
    assert _output(found) == _output(expected), name
    assert found.finished.reason == expected.finished.reason, name
    assert found.logprobs == expected.logprobs, f"{name}: log-probabilities"
    assert found.prompt_logprobs == expected.prompt_logprobs, f"{name}: log-probabilities of the prompt"
