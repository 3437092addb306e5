"""A short, seeded part of `tools/speculation_on_off.py`: answers with speculation are those without, bit for bit."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from openinfer_engine import EngineOptions, resolve
from openinfer_engine.engine_plan import EnginePlan
from openinfer_engine.options import KvCacheDtype
from openinfer_engine.testing.drafters import DraftKind, scripted_drafter, with_drafter, with_scripted_drafts
from openinfer_engine.testing.speculation import SpeculationCounts, check_on_is_off, mixed_requests
from openinfer_qwen3.family import Qwen3Definition

EAGLE3 = Path(__file__).parent / "fixtures_eagle3"
ROOMY: dict[str, Any] = {
    "num_blocks": 600,
    "max_num_seqs": 16,
    "max_step_tokens": 256,
    "block_size_tokens": 8,
    "batch_invariant": True,
}


def run(
    model_dir: Path, options: Mapping[str, Any], *, drafter: str, batch_invariant: bool = True, seed: int = 1
) -> SpeculationCounts:
    def engine(**given: Any) -> EnginePlan:
        return resolve(Qwen3Definition(), model_dir, EngineOptions(**ROOMY | given))

    def make_on(outputs: Mapping[int, Sequence[int]]) -> EnginePlan:
        if drafter in set(DraftKind):
            return with_drafter(engine(**options), scripted_drafter(DraftKind(drafter), outputs), max_drafts=4)
        return engine(**options, speculative=f"{drafter},adaptive=false")

    ranks = {"tensor_parallel_size": options.get("tensor_parallel_size", 1)}
    off = engine(**ranks, prefix_cache=False)
    requests = mixed_requests(off.worker_limits.num_token_ids, count=30, seed=seed)
    return check_on_is_off(off, make_on, requests, seed=seed)


@pytest.mark.parametrize(
    ("options", "drafter", "happens"),
    [
        ({"max_step_tokens": 20, "max_num_seqs": 7}, "ngram", "cached_tokens"),
        (
            {"num_blocks": 40, "block_size_tokens": 4, "max_step_tokens": 40},
            "ngram,k=7,n_min=1,match=latest",
            "preemptions",
        ),
        ({"num_blocks": 24, "kv_tier": ["host=16MiB"]}, "ngram,n_min=1", "tier_tokens"),
        ({"tensor_parallel_size": 2}, "ngram,n_min=1", "accepted"),
        ({"num_blocks": 40, "block_size_tokens": 4}, "right", "accepted"),
        ({"num_blocks": 40, "block_size_tokens": 4}, "hostile", "preemptions"),
    ],
)
def test_on_is_off(fixtures: Path, options: dict[str, Any], drafter: str, happens: str) -> None:
    counts = run(fixtures / "tied", options, drafter=drafter)
    assert counts.accepted > 0
    assert counts.drafts >= counts.accepted
    assert getattr(counts, happens) > 0


def test_a_difference_is_found(fixtures: Path) -> None:
    """The same requests by an engine that rounds its KV: a comparison that lets it pass would let anything pass."""

    def engine(**given: Any) -> EnginePlan:
        return resolve(Qwen3Definition(), fixtures / "tied", EngineOptions(**ROOMY | given))

    off = engine(prefix_cache=False)
    requests = mixed_requests(off.worker_limits.num_token_ids, count=30, seed=1)
    with pytest.raises(AssertionError, match="request"):
        check_on_is_off(off, lambda _: engine(speculative="ngram", kv_cache_dtype=KvCacheDtype.FP8), requests, seed=1)


def test_scripted_drafts_that_may_be_of_other_answers_end_where_these_differ(fixtures: Path) -> None:
    def engine(**given: Any) -> EnginePlan:
        return resolve(Qwen3Definition(), fixtures / "tied", EngineOptions(**ROOMY | given))

    off = engine(prefix_cache=False)
    num_ids = off.worker_limits.num_token_ids
    requests = mixed_requests(num_ids, count=30, seed=1)

    def make_on(outputs: Mapping[int, Sequence[int]]) -> EnginePlan:
        others = {key: [*ids[:4], *((each + 1) % num_ids for each in ids[4:])] for key, ids in outputs.items()}
        return with_drafter(engine(), scripted_drafter(DraftKind.RIGHT, others, is_exact=False), max_drafts=4)

    counts = check_on_is_off(off, make_on, requests, seed=1)
    assert counts.drafts > counts.accepted > 0


def test_a_drafter_computes_in_each_step_also_where_its_drafts_are_replaced() -> None:
    def engine(**given: Any) -> EnginePlan:
        return resolve(Qwen3Definition(), EAGLE3 / "model", EngineOptions(**ROOMY | given))

    off = engine(prefix_cache=False)
    requests = mixed_requests(off.worker_limits.num_token_ids, count=30, seed=1, length=2)
    given = f"eagle3,k=3,adaptive=false,model={EAGLE3 / 'drafter'}"

    def make_on(outputs: Mapping[int, Sequence[int]]) -> EnginePlan:
        return with_scripted_drafts(engine(speculative=given, num_blocks=60), DraftKind.RIGHT, outputs)

    counts = check_on_is_off(off, make_on, requests, seed=1)
    assert counts.drafts == counts.accepted > 0
    own = check_on_is_off(off, lambda _: engine(speculative=given), requests, seed=1)
    assert 0 < own.accepted < own.drafts
