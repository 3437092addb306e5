"""Logits against those that transformers' Qwen3.5 classes computed, however a sequence is cut into steps.

`tools/golden/qwen35.py` recorded them in float32; the largest are about 7. The largest difference seen here was 2.4e-4;
transformers itself is up to 7e-5 away from its own float64.
"""

from pathlib import Path
from typing import Any

import pytest

from openinfer_engine.testing import Golden, RecordedModel, check_greedy_drafts, check_recorded_drafts
from openinfer_qwen35.family import Qwen35Definition

TOLERANCE = 1e-3


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


@pytest.mark.parametrize("chunk", [1, 7, 64, 65, 149])
def test_chunked_prefill_gives_the_recorded_logits(recorded: RecordedModel, chunk: int) -> None:
    recorded.check_chunks(chunk)


def test_decode_after_prefill_gives_the_recorded_logits(recorded: RecordedModel) -> None:
    recorded.check_decode()


@pytest.mark.parametrize("seed", range(4))
def test_mixed_steps_of_chunks_and_decode_rows_give_the_recorded_logits(recorded: RecordedModel, seed: int) -> None:
    recorded.check_mixed(seed)


def test_sequence_that_begins_again_in_another_slot_gives_the_recorded_logits(model_dir: Path, harness: Any) -> None:
    golden, model = Golden(model_dir), harness(model_dir)
    tokens = golden.tokens("0")
    model.step({"0": tokens[:70], "1": golden.tokens("1")[:9]})
    model.step({"0": [tokens[70]], "1": [3]})
    model.restart("0")
    model.restart("1")
    assert golden.error("1", model.step({"1": golden.tokens("1")})["1"]) < TOLERANCE
    assert golden.error("0", model.step({"0": tokens})["0"]) < TOLERANCE


def test_sequence_that_begins_on_copied_states_gives_the_recorded_logits(model_dir: Path, harness: Any) -> None:
    golden, model = Golden(model_dir), harness(model_dir)
    tokens = golden.tokens("0")
    model.step({"parent": tokens[:48]})
    model.fork("child", "parent")
    model.step({"parent": [5, 6, 7]})
    assert golden.error("0", model.step({"child": tokens[48:]})["child"], first=48) < TOLERANCE


def test_ranks_together_give_the_recorded_logits(recorded: RecordedModel) -> None:
    """As many as the model's heads allow; 263 rows of vocabulary do not divide by them."""
    recorded.check_ranks(3 if recorded.model_dir.name == "text_untied" else 2, prompt=30)


def rope(theta: float, factor: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": factor}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("text_tied", {"rope_parameters": rope(5e6, 0.25)}),
        ("text_tied", {"rope_parameters": rope(1e7, 0.5)}),
        ("text_tied", {"rms_norm_eps": 1e-3}),
        ("text_untied", {"rope_parameters": rope(20000.0, 0.5)}),
    ],
)
def test_recorded_logits_notice_a_config_that_is_slightly_off(
    fixtures: Path, harness: Any, name: str, change: dict[str, Any]
) -> None:
    RecordedModel(make=harness, model_dir=fixtures / name, tolerance=TOLERANCE).check_notices(change)


def test_rows_with_drafts_give_the_recorded_log_probabilities(model_dir: Path) -> None:
    check_recorded_drafts(Qwen35Definition(), model_dir, tolerance=TOLERANCE)


def test_greedy_answers_over_drafts_are_the_likeliest_tokens(model_dir: Path) -> None:
    check_greedy_drafts(Qwen35Definition(), model_dir, tolerance=TOLERANCE)
