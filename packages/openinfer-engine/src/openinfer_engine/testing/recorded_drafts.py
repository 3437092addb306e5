"""Golden gates with drafts on: rows of several positions say what a reference recorded in float32.

`check_recorded_drafts` forces the recorded tokens by masks, so that drafts of them are accepted and others refused, and
holds the log-probabilities at each position against the recorded logits. Masked rows are launched operator by operator
on a GPU; `check_greedy_drafts` has requests that ask for tokens alone, whose steps are replayed from graphs, and holds
each token against the logits of the family's model in float32 on a CPU, which its own gates hold against the recording.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from openinfer_core import GenerateRequest, RequestId, SamplingParams
from openinfer_core.events import TokenLogprobs
from openinfer_engine.engine_plan import EnginePlan, resolve
from openinfer_engine.model import ModelDefinition
from openinfer_engine.options import EngineOptions
from openinfer_engine.testing.drafted_steps import DraftedSteps
from openinfer_engine.testing.drafters import DraftKind, scripted_drafter, with_drafter
from openinfer_engine.testing.drafts import run_drafted_steps
from openinfer_engine.testing.family import FamilyHarness
from openinfer_engine.testing.golden import Golden

_KINDS = (DraftKind.RIGHT, DraftKind.WRONG, DraftKind.RANDOM)
_MAX_DRAFTS = 7
_TOP = 20  # log-probabilities of each position
_PROMPT_TOKENS = 3, 8, 1
_GREEDY_TOKENS = 40
_LEAST_SHARE = {DraftKind.RIGHT: 0.5, DraftKind.WRONG: 0.0, DraftKind.RANDOM: 0.1}
"""Of what is compared, drafts of the host included, that are accepted at least."""
_SIZES: dict[str, Any] = {
    "max_num_seqs": 5,
    "max_step_tokens": 512,
    "block_size_tokens": 8,
    "num_blocks": 120,
    "max_model_tokens": 160,
}


def check_recorded_drafts(
    definition: ModelDefinition[Any],
    model_dir: Path,
    *,
    tolerance: float,
    kinds: Sequence[DraftKind] = _KINDS,
    **options: Any,
) -> float:
    """Recorded sequences, of which rows with up to eight positions are computed, give the recorded log-probabilities.

    Args:
        definition: of the family.
        model_dir: a model with a `Golden`.
        tolerance: largest difference of a log-probability.
        kinds: drafters.
        options: fields of `EngineOptions`, such as `device`.

    Returns:
        The largest difference.

    Raises:
        AssertionError: a log-probability differs by `tolerance` or more, or few drafts were compared.
    """
    golden = Golden(model_dir)
    engine_plan = resolve(definition, model_dir, EngineOptions(**_SIZES | options))
    requests = {
        name: _request(index, golden.tokens(name), num_prompt=num_prompt)
        for index, (name, num_prompt) in enumerate(zip(golden.sequences, _PROMPT_TOKENS, strict=True))
    }
    tokens: dict[int, list[int]] = {request.request_id: golden.tokens(name) for name, request in requests.items()}
    outputs: dict[int, list[int]] = {
        request.request_id: tokens[request.request_id][len(request.prompt_token_ids) :] for request in requests.values()
    }
    worst = 0.0
    for seed, kind in enumerate(kinds):
        plan = with_drafter(engine_plan, scripted_drafter(kind, outputs, seed=seed), max_drafts=_MAX_DRAFTS)
        allowed = partial(_recorded_token, tokens=tokens)
        found, steps = run_drafted_steps(plan, [*requests.values()], seed=seed, outputs=outputs, allowed=allowed)
        _check_counts(plan, steps, kind)
        for name, request in requests.items():
            answer = found[request.request_id]
            assert answer.token_ids == outputs[request.request_id], f"sequence {name} is not what was forced"
            worst = max(worst, _difference(golden, name, len(request.prompt_token_ids), answer.logprobs))
        assert worst < tolerance, f"drafter {kind}: log-probabilities differ by {worst:.3g}"
    return worst


def check_greedy_drafts(
    definition: ModelDefinition[Any],
    model_dir: Path,
    *,
    tolerance: float,
    kinds: Sequence[DraftKind] = _KINDS,
    **options: Any,
) -> None:
    """Greedy answers over drafts are the likeliest tokens of the float32 model, or as likely but for `tolerance`.

    Args:
        definition: of the family.
        model_dir: a model with a `Golden`, whose beginnings are the prompts.
        tolerance: how much smaller than the largest logit that of an answer's token may be.
        kinds: drafters.
        options: fields of `EngineOptions`, such as `device`.

    Raises:
        AssertionError: a token is less likely, or few drafts were compared.
    """
    golden = Golden(model_dir)
    engine_plan = resolve(definition, model_dir, EngineOptions(**_SIZES | options))
    sampling = SamplingParams(max_tokens=_GREEDY_TOKENS, temperature=0)
    requests = [
        GenerateRequest(
            request_id=RequestId(index), prompt_token_ids=tuple(golden.tokens(name)[:count]), sampling=sampling
        )
        for index, (name, count) in enumerate(zip(golden.sequences, _PROMPT_TOKENS, strict=True))
    ]
    harness = FamilyHarness(definition, model_dir, num_blocks=400)
    plain, _ = run_drafted_steps(engine_plan, requests, seed=0, outputs={}, allowed=_any_token)
    # Of another batch an answer may be another one where two tokens are as likely: then its drafts end there.
    outputs = {id_: answer.token_ids for id_, answer in plain.items()}
    for seed, kind in enumerate(kinds):
        drafter = scripted_drafter(kind, outputs, seed=seed, is_exact=False)
        plan = with_drafter(engine_plan, drafter, max_drafts=_MAX_DRAFTS)
        found, steps = run_drafted_steps(plan, requests, seed=seed, outputs=outputs, allowed=_any_token)
        _check_counts(plan, steps, kind)
        for request in requests:
            ids = [*request.prompt_token_ids, *found[request.request_id].token_ids]
            name, first = f"{kind} {request.request_id}", len(request.prompt_token_ids)
            logits = harness.step({name: ids})[name][first - 1 : -1]
            harness.restart(name)
            lacking = logits.max(axis=1) - logits[np.arange(len(logits)), ids[first:]]
            assert lacking.max() < tolerance, f"drafter {kind}: a token is {lacking.max():.3g} less likely"


def _request(index: int, token_ids: Sequence[int], *, num_prompt: int) -> GenerateRequest:
    return GenerateRequest(
        request_id=RequestId(index),
        prompt_token_ids=tuple(token_ids[:num_prompt]),
        sampling=SamplingParams(max_tokens=len(token_ids) - num_prompt, temperature=0, logprobs=_TOP),
    )


def _recorded_token(
    request: GenerateRequest, output: Sequence[int], *, tokens: Mapping[int, Sequence[int]]
) -> list[int]:
    """The next one of the sequence; after its end, where drafts may reach, any."""
    token_ids = tokens[request.request_id]
    return [token_ids[min(len(request.prompt_token_ids) + len(output), len(token_ids) - 1)]]


def _any_token(request: GenerateRequest, output: Sequence[int]) -> None:
    return None


def _check_counts(plan: EnginePlan, steps: DraftedSteps, kind: DraftKind) -> None:
    assert plan.drafter is not None
    assert plan.drafter.faults.count == 0, f"drafter {kind} raised: it was told something wrong"
    assert steps.num_compared > 20, f"drafter {kind}: {steps.num_compared} drafts were compared"
    share = steps.num_accepted / steps.num_compared
    assert share >= _LEAST_SHARE[kind], f"drafter {kind}: {share:.0%} of the drafts were accepted"


def _difference(golden: Golden, name: str, num_prompt: int, logprobs: Sequence[TokenLogprobs]) -> float:
    """The largest of all log-probabilities that were told at recorded positions, from the prompt's last token on."""
    _, positions, logits = golden.sequences[name]
    places: list[int] = positions.tolist()
    differences: list[float] = []
    for position, recorded in zip(places, logits, strict=True):
        index = position - num_prompt + 1
        if 0 <= index < len(logprobs):
            expected, said = _log_softmax(recorded), logprobs[index]
            told = np.asarray([said.logprob, *said.top_logprobs])
            chosen = golden.tokens(name)[position + 1]
            differences.append(float(np.abs(told - expected[[chosen, *said.top_ids]]).max()))
    assert len(differences) >= len(positions) // 2, f"sequence {name}: {len(differences)} positions were recorded"
    return max(differences)


def _log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max()
    return shifted - np.log(np.exp(shifted).sum())
