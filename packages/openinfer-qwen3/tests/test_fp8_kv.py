"""Qwen3 with its KV in FP8: one answer however the engine gets there, bit for bit, and who refuses it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from openinfer_core import InvalidRequest, Refused
from openinfer_engine.engine_plan import resolve
from openinfer_engine.launch import build_loop
from openinfer_engine.model import ModelDefinition
from openinfer_engine.options import EngineOptions, KvCacheDtype
from openinfer_engine.testing import check_steps
from openinfer_engine.testing.answers import run_alone, run_together
from openinfer_engine.testing.traffic import random_requests
from openinfer_kernels.cpu import BatchInvariantCpuOps
from openinfer_kv_cache import FP8_KV_TAG, KvDtype
from openinfer_qwen3.family import Qwen3Definition

FP8 = KvDtype.FLOAT8_E4M3


def plan_of(model_dir: Path, **options: Any) -> Any:
    sizes: dict[str, Any] = {"max_num_seqs": 8, "max_step_tokens": 256, "block_size_tokens": 8, "num_blocks": 400}
    return resolve(Qwen3Definition(), model_dir, EngineOptions(**sizes | options))


def test_steps_however_cut_have_the_bits_of_a_whole_prompt(model_dir: Path, harness: Any) -> None:
    """Also after a prefix of another sequence, and again from the beginning: what is read is always what was kept."""
    tokens = np.random.default_rng(4).integers(0, 100, 61).tolist()
    made = {"ops": BatchInvariantCpuOps(), "num_blocks": 300, "kv_dtype": FP8}
    whole = harness(model_dir, **made).step({"whole": tokens})["whole"]
    check_steps(harness(model_dir, **made), tokens, whole, tolerance=0.0, name="KV in FP8")
    exact = harness(model_dir).step({"whole": tokens})["whole"]
    difference = float(np.abs(whole - exact).max())
    assert 1e-3 < difference < 1.0, f"FP8 moves logits a little, not by {difference}"


def test_ranks_together_say_what_one_rank_says(fixtures: Path, harness: Any) -> None:
    tokens = np.random.default_rng(4).integers(0, 100, 61).tolist()
    one, two = (
        harness(fixtures / "tied", ranks=ranks, kv_dtype=FP8).step({"whole": tokens})["whole"] for ranks in (1, 2)
    )
    # Another order of sums moves a number over a boundary of codes here and there.
    assert float(np.abs(one - two).max()) < 0.05


@pytest.mark.parametrize(
    ("happens", "options"),
    [
        ("preemptions", {"max_step_tokens": 24, "num_blocks": 19}),
        ("tier_tokens", {"num_blocks": 19, "kv_tier": ["host=16MiB"]}),
        ("cached_tokens", {"num_blocks": 60, "tensor_parallel_size": 2}),
    ],
)
def test_engine_gives_the_same_bits_alone_and_together(fixtures: Path, happens: str, options: dict[str, Any]) -> None:
    """Preempted, restored from a tier, from a cached prefix, on two ranks."""
    same: dict[str, Any] = {"batch_invariant": True, "kv_cache_dtype": KvCacheDtype.FP8}
    ranks = {"tensor_parallel_size": options.get("tensor_parallel_size", 1)}
    alone = build_loop(plan_of(fixtures / "tied", prefix_cache=False, **same, **ranks))
    together = build_loop(plan_of(fixtures / "tied", **same | options))
    requests = random_requests(8, vocab_size=100, max_prompt_tokens=30, shared_tokens=32, logprobs=2)
    try:
        expected = run_alone(alone, requests)
        found = run_together(together, requests, seed=1)
        again = run_together(together, requests, seed=2)
        assert getattr(together.stats(), happens) > 0
    finally:
        alone.close()
        together.close()
    for answers in (found, again):
        for request_id, answer in expected.items():
            assert answers[request_id].token_ids == answer.token_ids, request_id
            assert answers[request_id].logprobs == answer.logprobs, request_id


def test_plan_names_the_format_and_counts_twice_the_tokens_and_more(fixtures: Path) -> None:
    plain, fp8 = plan_of(fixtures / "tied"), plan_of(fixtures / "tied", kv_cache_dtype=KvCacheDtype.FP8)
    head_dim = plain.config.head_dim
    assert fp8.layouts[0].block_bytes * 4 * head_dim == plain.layouts[0].block_bytes * (head_dim + 4)
    ratio = fp8.plan().limits["kv_tokens_per_gib"] / plain.plan().limits["kv_tokens_per_gib"]
    assert ratio == pytest.approx(4 * head_dim / (head_dim + 4), rel=1e-4)
    assert fp8.parts["kv_cache_dtype"].startswith("fp8 (E4M3")
    assert plain.parts["kv_cache_dtype"] == "float32"
    assert fp8.memory_bytes["kv_cache"] < plain.memory_bytes["kv_cache"]


def test_layouts_of_two_formats_are_two_identities(fixtures: Path) -> None:
    """Tiers, KV events and other engines tell formats apart by the digest, which begins every block's name."""
    plain, fp8 = (plan_of(fixtures / "tied", kv_cache_dtype=each) for each in (KvCacheDtype.AUTO, KvCacheDtype.FP8))
    assert plain.layouts[0].digest != fp8.layouts[0].digest
    assert plain.scheduler_config.layout_digest != fp8.scheduler_config.layout_digest
    (group,) = fp8.layouts[0].groups
    assert group.quantization_tag == FP8_KV_TAG


def test_what_cannot_be_done_is_refused_by_name(fixtures: Path) -> None:
    with pytest.raises(Refused, match="kv_cache_dtype: the device cpu keeps KV in float32"):
        plan_of(fixtures / "tied", kv_cache_dtype=KvCacheDtype.BF16)

    class Other(Qwen3Definition):
        cache_formats = ModelDefinition.cache_formats

    with pytest.raises(Refused, match="kv_cache_dtype: the family qwen3 does not keep its KV in fp8"):
        resolve(Other(), fixtures / "tied", EngineOptions(kv_cache_dtype=KvCacheDtype.FP8))
    with pytest.raises((InvalidRequest, ValueError)):
        KvCacheDtype("fp4")
