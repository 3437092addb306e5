"""Logits against those that transformers' `Qwen3ForCausalLM` computed, however a sequence is cut into steps.

`tools/golden/qwen3.py` recorded them in float32; the largest are about 6. The largest difference seen here was 2e-5.
"""

from pathlib import Path
from typing import Any

import pytest

from openinfer_engine.testing import RecordedModel, check_steps

TOLERANCE = 1e-4


@pytest.fixture
def recorded(model_dir: Path, harness: Any) -> RecordedModel:
    return RecordedModel(make=harness, model_dir=model_dir, tolerance=TOLERANCE)


def test_recorded_sequences_are_long_and_their_logits_far_from_flat(recorded: RecordedModel) -> None:
    recorded.check_recording([90, 41, 7])


def test_whole_prefill_gives_the_recorded_logits(recorded: RecordedModel) -> None:
    recorded.check_whole()


@pytest.mark.parametrize("block_tokens", [1, 5, 16])
def test_prefill_of_all_sequences_in_one_step_gives_the_recorded_logits(
    recorded: RecordedModel, block_tokens: int
) -> None:
    recorded.check_together(block_tokens)


@pytest.mark.parametrize("chunk", [1, 7, 8, 33, 89])
def test_chunked_prefill_gives_the_recorded_logits(recorded: RecordedModel, chunk: int) -> None:
    recorded.check_chunks(chunk)


def test_decode_after_prefill_gives_the_recorded_logits(recorded: RecordedModel) -> None:
    recorded.check_decode()


@pytest.mark.parametrize("seed", range(4))
def test_mixed_steps_of_chunks_and_decode_rows_give_the_recorded_logits(recorded: RecordedModel, seed: int) -> None:
    recorded.check_mixed(seed)


def test_cached_prefix_of_another_sequence_gives_the_recorded_logits(recorded: RecordedModel) -> None:
    recorded.check_cached_prefix()


def test_ranks_together_give_the_recorded_logits(recorded: RecordedModel) -> None:
    """As many as the model's heads allow; 257 or 131 rows of vocabulary do not divide by them."""
    recorded.check_ranks(3 if recorded.model_dir.name == "odd_sizes" else 2, prompt=30)


def test_steps_of_a_sequence_that_fills_the_whole_context_are_checked(model_dir: Path, harness: Any) -> None:
    tokens = [token % 100 for token in range(7, 55)]
    whole = harness(model_dir, max_model_tokens=len(tokens)).step({"whole": tokens})["whole"]
    full = harness(model_dir, max_model_tokens=len(tokens))
    check_steps(full, tokens, whole, tolerance=TOLERANCE, name="as long as the context")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("tied", {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}),
        ("tied", {"rms_norm_eps": 1e-3}),
        ("untied_yarn", {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}}),
        (
            "untied_yarn",
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1000000.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                    "attention_factor": 1.0,
                }
            },
        ),
        ("odd_sizes", {"rope_theta": 20000.0}),
    ],
)
def test_recorded_logits_notice_a_config_that_is_slightly_off(
    fixtures: Path, harness: Any, name: str, change: dict[str, Any]
) -> None:
    RecordedModel(make=harness, model_dir=fixtures / name, tolerance=TOLERANCE).check_notices(change)
