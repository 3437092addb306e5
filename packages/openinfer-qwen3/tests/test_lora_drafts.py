"""Drafts in batches whose rows have adapters, or none: answers are those without a drafter, bit for bit."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from openinfer_engine import EngineOptions, resolve
from openinfer_engine.engine_plan import EnginePlan
from openinfer_engine.options import KvCacheDtype
from openinfer_engine.testing.drafters import DraftKind, scripted_drafter, with_drafter
from openinfer_engine.testing.speculation import SpeculationCounts, check_on_is_off, mixed_requests
from openinfer_qwen3.family import Qwen3Definition

HERE = Path(__file__).parent
MODEL, ADAPTERS = HERE / "fixtures/tied", HERE / "adapters"
NAMES = ("patterns", "rank_40", "rank_8")
ROOMY: dict[str, Any] = {
    "num_blocks": 600,
    "max_num_seqs": 16,
    "max_step_tokens": 256,
    "block_size_tokens": 8,
    "batch_invariant": True,
    "lora": [f"{name}={ADAPTERS / name}" for name in NAMES],
    "max_lora_rank": 40,
}
SHORT = {"num_blocks": 24, "block_size_tokens": 4, "max_step_tokens": 40}


def engine(**options: Any) -> EnginePlan:
    return resolve(Qwen3Definition(), MODEL, EngineOptions(**{**ROOMY, **options}))


def run(drafter: str, options: Mapping[str, Any], *, seed: int = 1, count: int = 36) -> SpeculationCounts:
    def make_on(outputs: Mapping[int, Sequence[int]]) -> EnginePlan:
        if drafter in set(DraftKind):
            return with_drafter(engine(**options), scripted_drafter(DraftKind(drafter), outputs), max_drafts=4)
        return engine(**options, speculative=drafter)

    same = {name: options[name] for name in ("tensor_parallel_size", "kv_cache_dtype") if name in options}
    off = engine(**same, max_loras=3, prefix_cache=False)
    requests = [
        msgspec.structs.replace(each, lora=(*NAMES, None)[index % 4])
        for index, each in enumerate(mixed_requests(off.worker_limits.num_token_ids, count=count, seed=seed))
    ]
    return check_on_is_off(off, make_on, requests, seed=seed)


@pytest.mark.parametrize(
    ("drafter", "options", "happens"),
    [
        ("ngram,n_min=1,adaptive=false", {}, "cached_tokens"),
        ("ngram,k=7,n_min=1,match=latest,adaptive=false", {"max_loras": 2}, "drafts"),
        ("right", SHORT, "preemptions"),
        ("hostile", {**SHORT, "max_loras": 2}, "preemptions"),
        ("random", {"num_blocks": 24, "kv_tier": ["host=16MiB"]}, "tier_tokens"),
        ("random", {"tensor_parallel_size": 2}, "accepted"),
        ("random", {"kv_cache_dtype": KvCacheDtype.FP8, **SHORT}, "accepted"),
    ],
)
def test_answers_with_drafts_and_adapters_are_those_without_drafts(
    drafter: str, options: Mapping[str, Any], happens: str
) -> None:
    counts = run(drafter, options)
    assert counts.drafts > 20
    assert getattr(counts, happens) > 0


def test_requests_whose_adapter_is_exchanged_are_found() -> None:
    """A negative control: the comparison sees another adapter."""
    off = engine(max_loras=3, prefix_cache=False)
    requests = [msgspec.structs.replace(each, lora=NAMES[0]) for each in mixed_requests(257, count=8, seed=1)]

    def make_on(outputs: Mapping[int, Sequence[int]]) -> EnginePlan:
        return resolve(
            Qwen3Definition(),
            MODEL,
            EngineOptions(**{**ROOMY, "lora": [f"{NAMES[0]}={ADAPTERS / 'rank_8'}"], "speculative": "ngram"}),
        )

    with pytest.raises(AssertionError, match="seed 1, request"):
        check_on_is_off(off, make_on, requests, seed=1)
