"""Engines whose steps are timed before the first request: nothing is left of that, on one rank and on several."""

from pathlib import Path

import pytest

from openinfer_engine import EngineOptions, StepLoop, build_loop, resolve
from openinfer_engine.testing import random_requests
from openinfer_engine.testing.answers import run_at_once
from openinfer_qwen3.family import Qwen3Definition


def make_loop(model_dir: Path, **options: object) -> StepLoop:
    fields = {"num_blocks": 64, "max_num_seqs": 4, "batch_invariant": True, **options}
    return build_loop(resolve(Qwen3Definition(), model_dir, EngineOptions(**fields)))


def phases(loop: StepLoop) -> set[str]:
    return {phase.name for phase in loop.info.start}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 2, "rank_host": "process"},
        {"kv_tier": ["host=16MiB"], "num_blocks": 24},
    ],
)
def test_an_engine_is_as_new_after_its_steps_were_timed(fixtures: Path, options: dict[str, object]) -> None:
    model_dir = fixtures / "tied"
    loop, other = make_loop(model_dir, speculative="ngram,n_min=1", **options), make_loop(model_dir, **options)
    try:
        assert "draft_times" in phases(loop)
        assert "draft_times" not in phases(other)
        fresh = loop.stats()
        assert (fresh.steps, fresh.blocks_used, fresh.generated_tokens, fresh.drafter_faults) == (0, 0, 0, 0)
        assert fresh.spec_decode_num_draft_tokens == 0
        loop.scheduler.check_integrity()  # pyright: ignore[reportAttributeAccessIssue]

        requests = random_requests(6, vocab_size=loop.info.num_token_ids, max_prompt_tokens=40, logprobs=1)
        assert run_at_once(loop, requests) == run_at_once(other, requests)
        assert loop.stats().drafter_faults == 0
        assert loop.stats().prompt_tokens == other.stats().prompt_tokens
        assert loop.stats().cached_tokens == other.stats().cached_tokens
    finally:
        loop.close()
        other.close()


def test_steps_are_not_timed_where_nothing_is_decided_by_it(fixtures: Path) -> None:
    loop = make_loop(fixtures / "tied", speculative="ngram,adaptive=false")
    assert "draft_times" not in phases(loop)
    loop.close()
