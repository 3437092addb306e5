"""Logits against those that transformers' `DeepseekV2ForCausalLM` computed, however a sequence is cut into steps.

`tools/golden/deepseek_v2.py` recorded them in float32; the largest are about 7. The largest difference
seen here was 5.1e-5.
"""

from pathlib import Path
from typing import Any

import pytest

from openinfer_deepseek.family import DeepseekV2Definition
from openinfer_engine.testing import RecordedModel, check_greedy_drafts, check_recorded_drafts

TOLERANCE = 1e-4


@pytest.fixture
def recorded(model_dir: Path, harness: Any) -> RecordedModel:
    return RecordedModel(make=harness, model_dir=model_dir, tolerance=TOLERANCE)


def test_recorded_sequences_are_long_and_their_logits_far_from_flat(recorded: RecordedModel) -> None:
    recorded.check_recording([150, 41, 7])


def test_whole_prefill_gives_the_recorded_logits(recorded: RecordedModel) -> None:
    recorded.check_whole()


@pytest.mark.parametrize("block_tokens", [1, 5, 16])
def test_prefill_of_all_sequences_in_one_step_gives_the_recorded_logits(
    recorded: RecordedModel, block_tokens: int
) -> None:
    recorded.check_together(block_tokens)


@pytest.mark.parametrize("chunk", [1, 7, 39, 40, 149])
def test_chunked_prefill_gives_the_recorded_logits(recorded: RecordedModel, chunk: int) -> None:
    recorded.check_chunks(chunk)


def test_decode_after_prefill_gives_the_recorded_logits(recorded: RecordedModel) -> None:
    recorded.check_decode()


@pytest.mark.parametrize("seed", range(4))
def test_mixed_steps_of_chunks_and_decode_rows_give_the_recorded_logits(recorded: RecordedModel, seed: int) -> None:
    recorded.check_mixed(seed)


def test_cached_prefix_of_another_sequence_gives_the_recorded_logits(recorded: RecordedModel) -> None:
    recorded.check_cached_prefix()


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_together_give_the_recorded_logits(recorded: RecordedModel, ranks: int) -> None:
    """271 rows of vocabulary do not divide by them."""
    recorded.check_ranks(ranks, prompt=60)


def yarn(**change: Any) -> dict[str, Any]:
    fields = {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 64}
    return {"rope_scaling": fields | {"mscale": 0.707, "mscale_all_dim": 0.707} | change}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("lite", {"rope_theta": 20000.0}),
        ("lite", yarn(mscale_all_dim=0.6, mscale=0.6)),
        ("lite", yarn(mscale=0.8)),
        ("lite", yarn(beta_slow=2)),
        ("lite", {"rms_norm_eps": 1e-3}),
        ("lite", {"routed_scaling_factor": 1.01}),
        ("lite", {"num_experts_per_tok": 3}),
        ("groups", {"topk_group": 3}),
        ("groups", {"topk_method": "greedy"}),
        ("groups", {"routed_scaling_factor": 15.9}),
        ("groups", {"rms_norm_eps": 1e-5}),
    ],
)
def test_recorded_logits_notice_a_config_that_is_slightly_off(
    fixtures: Path, harness: Any, name: str, change: dict[str, Any]
) -> None:
    RecordedModel(make=harness, model_dir=fixtures / name, tolerance=TOLERANCE).check_notices(change)


def test_rows_with_drafts_give_the_recorded_log_probabilities(model_dir: Path) -> None:
    check_recorded_drafts(DeepseekV2Definition(), model_dir, tolerance=TOLERANCE)


def test_greedy_answers_over_drafts_are_the_likeliest_tokens(model_dir: Path) -> None:
    check_greedy_drafts(DeepseekV2Definition(), model_dir, tolerance=TOLERANCE)
