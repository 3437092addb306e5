"""What drafters that are models do on a CPU: how much of their drafts is accepted, and that they change no token.

PYTHONPATH=tools python -m drafters.record --text TEXT --requests 200 --output benchmarks/results/cpu/drafters.json

Models and drafters are the trained fixtures of the two families. Acceptance is of answers to pieces of a text that they
were not trained on, greedy and sampled, without a prefix cache and as second turns after a cached prefix; mutants read
the hidden state of another row, or before the model's last norm. Requests with seeds, penalties, biases, stops and
log-probabilities come together in an engine with few blocks, and are held against each alone without a drafter, bit for
bit.
"""

import argparse
import json
import platform
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from openinfer_core import GenerateRequest, RequestId, SamplingParams
from openinfer_engine.drafters.contract import ObservedStep
from openinfer_engine.model import ModelDefinition
from openinfer_engine.testing import check_model_drafter, drafted_requests, make_drafting_loop, run_at_once
from openinfer_kernels import Array
from openinfer_qwen3.eagle3 import Eagle3Drafter
from openinfer_qwen3.family import Qwen3Definition
from openinfer_qwen35.family import Qwen35Definition
from openinfer_qwen35.model import Qwen35Model
from openinfer_qwen35.mtp import MtpDrafter

PACKAGES = Path(__file__).parents[2] / "packages"
PROMPT_TOKENS, ANSWER_TOKENS, MAX_DRAFTS = 96, 64, 3


class ShiftedMtp(MtpDrafter):
    """Reads the hidden state of one row before."""

    def observe(self, step: ObservedStep) -> None:
        super().observe(replace(step, hidden=np.roll(step.hidden, 1, axis=0)))

    def draft(self, slots: Array, last_ids: Array, hidden: Array, lengths: Array) -> Array:
        return super().draft(slots, last_ids, np.roll(hidden, 1, axis=0), lengths)


class BeforeNormMtp(MtpDrafter):
    """Reads the hidden state before the model's last norm, up to a factor that its own norm takes away."""

    def observe(self, step: ObservedStep) -> None:
        super().observe(replace(step, hidden=self._before(step.hidden)))

    def draft(self, slots: Array, last_ids: Array, hidden: Array, lengths: Array) -> Array:
        return super().draft(slots, last_ids, self._before(hidden), lengths)

    def _before(self, hidden: Array) -> Array:
        model = self._model
        assert isinstance(model, Qwen35Model)
        return hidden / (1 + model.weights.norm)


class ShiftedEagle3(Eagle3Drafter):
    """Reads the hidden states of one row before."""

    def observe(self, step: ObservedStep) -> None:
        super().observe(replace(step, taps=tuple(np.roll(tap, 1, axis=0) for tap in step.taps)))


def main() -> None:
    """Read the command line, run, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--pieces", type=int, default=12)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    ids = [byte for byte in arguments.text.read_bytes() if byte < 128]
    prompts = pieces(ids, arguments.pieces)
    eagle = PACKAGES / "openinfer-qwen3/tests/fixtures_eagle3"
    named = {"drafter_options": {"model": str(eagle / "drafter")}}
    of_qwen35 = (Qwen35Definition(), PACKAGES / "openinfer-qwen35/tests/fixtures_mtp")
    of_qwen3 = (Qwen3Definition(), eagle / "model")
    found = {
        "machine": {"platform": platform.platform(), "device": "cpu, float32, batch-invariant"},
        "text": f"{len(prompts)} pieces of {PROMPT_TOKENS} bytes, {ANSWER_TOKENS} bytes answered",
        "mtp": of_drafter(*of_qwen35, MtpDrafter, prompts, arguments.requests, {}),
        "mtp_mutants": {
            "shifted row": acceptance(*of_qwen35, ShiftedMtp, prompts, {}),
            "before the last norm": acceptance(*of_qwen35, BeforeNormMtp, prompts, {}),
        },
        "eagle3": of_drafter(*of_qwen3, Eagle3Drafter, prompts, arguments.requests, named),
        "eagle3_mutants": {"shifted row": acceptance(*of_qwen3, ShiftedEagle3, prompts, named)},
    }
    arguments.output.write_text(json.dumps(found, indent=1) + "\n")


def pieces(ids: Sequence[int], count: int) -> list[tuple[int, ...]]:
    """Prompts spread evenly over a text."""
    begins = np.linspace(0, len(ids) - PROMPT_TOKENS, count).astype(int).tolist()
    return [tuple(ids[begin : begin + PROMPT_TOKENS]) for begin in begins]


def of_drafter(
    definition: ModelDefinition[Any],
    model_dir: Path,
    factory: Any,
    prompts: Sequence[tuple[int, ...]],
    num_requests: int,
    options: dict[str, Any],
) -> dict[str, Any]:
    """Acceptance, and random traffic in engines with few blocks, one rank and two, against requests alone."""
    traffic: list[dict[str, Any]] = []
    for ranks in (1, 2):
        began = time.monotonic()
        requests = drafted_requests(128, count=num_requests, shared_tokens=40)
        sizes: dict[str, Any] = {"max_step_tokens": 24, "num_blocks": 24, "tensor_parallel_size": ranks}
        tier = {"kv_tier": ["host=16MiB"]}
        stats = check_model_drafter(
            definition, model_dir, factory, requests=requests, max_drafts=MAX_DRAFTS, **sizes, **tier, **options
        )
        traffic.append(
            {
                "ranks": ranks,
                "requests_equal_to_those_without": 2 * num_requests,
                "preemptions": stats.preemptions,
                "cached_tokens": stats.cached_tokens,
                "tier_tokens": stats.tier_tokens,
                "compared_drafts": stats.spec_decode_num_draft_tokens,
                "accepted_drafts": stats.spec_decode_num_accepted_tokens,
                "seconds": round(time.monotonic() - began, 1),
            }
        )
        print(factory.__name__, traffic[-1], flush=True)
    uncached = {**options, "prefix_cache": False}
    of = (definition, model_dir, factory, prompts)
    return {
        "greedy": acceptance(*of, options, temperature=0.0),
        "sampled": acceptance(*of, options),
        "second turns": acceptance(*of, options, turns=2),
        "second turns, uncached": acceptance(*of, uncached, turns=2),
        "traffic": traffic,
    }


def acceptance(
    definition: ModelDefinition[Any],
    model_dir: Path,
    factory: Any,
    prompts: Sequence[tuple[int, ...]],
    options: dict[str, Any],
    *,
    turns: int = 1,
    temperature: float = 1.0,
) -> dict[str, Any]:
    """Of answers, one request at a time; of further turns the counts are those of the last one."""
    loop = make_drafting_loop(definition, model_dir, factory, max_drafts=MAX_DRAFTS, **options)
    sampling = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=temperature, seed=5)
    before, known, cached = loop.stats(), list(prompts), 0
    for turn in range(turns):
        before, cached = loop.stats(), 0
        for index, prompt in enumerate(known):
            request = GenerateRequest(
                request_id=RequestId(turn * len(known) + index), prompt_token_ids=prompt, sampling=sampling
            )
            answer = run_at_once(loop, [request])[request.request_id]
            cached += answer.cached_tokens
            known[index] = (*prompt, *answer.token_ids, *prompts[(index + 1) % len(prompts)][:20])
    after = loop.stats()
    loop.close()
    compared = after.spec_decode_num_draft_tokens - before.spec_decode_num_draft_tokens
    accepted = after.spec_decode_num_accepted_tokens - before.spec_decode_num_accepted_tokens
    rounds = after.spec_decode_num_drafts - before.spec_decode_num_drafts
    assert after.drafter_faults == 0
    return {
        "cached_tokens": cached,
        "compared": compared,
        "accepted": accepted,
        "share": round(accepted / compared, 4),
        "tokens_per_round": round(1 + accepted / rounds, 3),
    }


if __name__ == "__main__":
    main()
