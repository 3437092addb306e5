"""Logits against those that transformers' `DeepseekV4ForCausalLM` computed, however a sequence is cut into steps.

`tools/golden/deepseek_v4.py` recorded them in float32; the largest are about 7. The largest difference seen here was
2e-5.
"""

from pathlib import Path
from typing import Any

import pytest

from openinfer_deepseek_v4.family import DeepseekV4Definition
from openinfer_engine.testing import Golden, check_greedy_drafts, check_recorded_drafts, check_steps

TOLERANCE = 1e-3


@pytest.fixture
def golden(model_dir: Path) -> Golden:
    return Golden(model_dir)


def test_recorded_sequences_are_long_and_their_logits_far_from_flat(golden: Golden) -> None:
    assert [len(golden.tokens(sequence)) for sequence in golden.sequences] == [140, 53, 9]
    for _, _, logits in golden.sequences.values():
        assert logits.std() > 0.5


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_whole_prefill_gives_the_recorded_logits(model_dir: Path, golden: Golden, harness: Any, ranks: int) -> None:
    model = harness(model_dir, ranks=ranks, num_blocks=100)
    logits = model.step({sequence: golden.tokens(sequence) for sequence in golden.sequences})
    for sequence in golden.sequences:
        assert golden.error(sequence, logits[sequence]) < TOLERANCE


@pytest.mark.parametrize(("ranks", "block_tokens"), [(1, 1), (1, 6), (1, 16), (2, 8)])
def test_logits_do_not_depend_on_steps_prefixes_or_ranks(
    model_dir: Path, golden: Golden, harness: Any, ranks: int, block_tokens: int
) -> None:
    """A prefix hit, a sequence computed again, decoding and random cuts, against the whole sequence, checked here."""
    tokens = golden.tokens("0")
    whole = harness(model_dir, num_blocks=100).step({"0": tokens})["0"]
    assert golden.error("0", whole) < TOLERANCE
    model = harness(model_dir, ranks=ranks, block_tokens=block_tokens, num_blocks=900 // block_tokens + 10)
    check_steps(model, tokens, whole, tolerance=TOLERANCE, name=f"{ranks} ranks, blocks of {block_tokens}")


@pytest.mark.parametrize(
    "change",
    [
        {"rms_norm_eps": 1e-3},
        {"hc_sinkhorn_iters": 2},
        {"swiglu_limit": 1.1},
        {"clamp_shared_experts": False},
        {"index_topk": 6},
        {"sliding_window": 13},
        {"routed_scaling_factor": 1.6},
        {"rope_parameters": {"main": {"rope_theta": 1e4}, "compress": {"rope_theta": 1.6e5}}},
    ],
)
def test_recorded_logits_notice_a_config_that_is_slightly_off(
    model_dir: Path, golden: Golden, harness: Any, change: dict[str, Any]
) -> None:
    logits = harness(model_dir, change=change).step({"0": golden.tokens("0")})["0"]
    assert golden.error("0", logits) > 10 * TOLERANCE


def test_rows_with_drafts_give_the_recorded_log_probabilities(model_dir: Path) -> None:
    check_recorded_drafts(DeepseekV4Definition(), model_dir, tolerance=TOLERANCE)


def test_greedy_answers_over_drafts_are_the_likeliest_tokens(model_dir: Path) -> None:
    check_greedy_drafts(DeepseekV4Definition(), model_dir, tolerance=TOLERANCE)
