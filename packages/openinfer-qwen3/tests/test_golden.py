"""Logits against those that transformers' `Qwen3ForCausalLM` computed, however a sequence is cut into steps.

`tools/golden/qwen3.py` recorded them in float32; the largest are about 6. The largest difference seen here was 2e-5.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from openinfer_engine.testing import Golden, step_at_random

TOLERANCE = 1e-4


@pytest.fixture
def golden(model_dir: Path) -> Golden:
    return Golden(model_dir)


@pytest.fixture
def ranks(model_dir: Path) -> int:
    """More than one rank, as many as the model's heads allow."""
    return 3 if model_dir.name == "odd_sizes" else 2


def test_recorded_sequences_are_long_and_their_logits_far_from_flat(golden: Golden) -> None:
    assert [len(golden.tokens(sequence)) for sequence in golden.sequences] == [90, 41, 7]
    for _, positions, logits in golden.sequences.values():
        assert len(positions) == len(logits) >= 7
        assert logits.std() > 0.5


def test_whole_prefill_gives_the_recorded_logits(model_dir: Path, golden: Golden, harness: Any) -> None:
    model = harness(model_dir)
    for sequence in golden.sequences:
        logits = model.step({sequence: golden.tokens(sequence)})[sequence]
        assert golden.error(sequence, logits) < TOLERANCE


@pytest.mark.parametrize("block_tokens", [1, 5, 16])
def test_prefill_of_all_sequences_in_one_step_gives_the_recorded_logits(
    model_dir: Path, golden: Golden, harness: Any, block_tokens: int
) -> None:
    model = harness(model_dir, block_tokens=block_tokens, num_blocks=200)
    logits = model.step({sequence: golden.tokens(sequence) for sequence in golden.sequences})
    for sequence in golden.sequences:
        assert golden.error(sequence, logits[sequence]) < TOLERANCE


@pytest.mark.parametrize("chunk", [1, 7, 8, 33, 89])
def test_chunked_prefill_gives_the_recorded_logits(model_dir: Path, golden: Golden, harness: Any, chunk: int) -> None:
    model = harness(model_dir)
    tokens = golden.tokens("0")
    pieces = [model.step({"0": tokens[i : i + chunk]})["0"] for i in range(0, len(tokens), chunk)]
    assert golden.error("0", np.concatenate(pieces)) < TOLERANCE


def test_decode_after_prefill_gives_the_recorded_logits(model_dir: Path, golden: Golden, harness: Any) -> None:
    model = harness(model_dir)
    tokens = golden.tokens("0")
    prefill = model.step({"0": tokens[:40]})["0"]
    decoded = [model.step({"0": [token]})["0"] for token in tokens[40:]]
    assert golden.error("0", np.concatenate([prefill, *decoded])) < TOLERANCE


@pytest.mark.parametrize("seed", range(4))
def test_mixed_steps_of_chunks_and_decode_rows_give_the_recorded_logits(
    model_dir: Path, golden: Golden, harness: Any, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    model = harness(model_dir, block_tokens=int(rng.integers(1, 17)), num_blocks=200)
    found, num_steps = step_at_random(model, {name: golden.tokens(name) for name in golden.sequences}, rng)
    assert num_steps > 10
    for sequence, logits in found.items():
        assert golden.error(sequence, logits) < TOLERANCE


def test_cached_prefix_of_another_sequence_gives_the_recorded_logits(
    model_dir: Path, golden: Golden, harness: Any
) -> None:
    model = harness(model_dir)
    tokens = golden.tokens("0")
    model.step({"parent": [*tokens[:48], 5, 6, 7]})
    model.fork("child", "parent", 48)
    assert golden.error("0", model.step({"child": tokens[48:]})["child"], first=48) < TOLERANCE


def test_ranks_together_give_the_recorded_logits(model_dir: Path, golden: Golden, harness: Any, ranks: int) -> None:
    """Also the ranks against one rank, and 257 or 131 rows of vocabulary that do not divide by them."""
    one, several = harness(model_dir), harness(model_dir, ranks=ranks)
    tokens = golden.tokens("0")
    steps = [tokens[:30], tokens[30:33], *([token] for token in tokens[33:40]), tokens[40:]]
    expected = np.concatenate([one.step({"0": step})["0"] for step in steps])
    logits = np.concatenate([several.step({"0": step})["0"] for step in steps])
    assert np.abs(logits - expected).max() < TOLERANCE
    assert golden.error("0", logits) < TOLERANCE


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
    golden = Golden(fixtures / name)
    logits = harness(fixtures / name, change=change).step({"0": golden.tokens("0")})["0"]
    assert golden.error("0", logits) > 10 * TOLERANCE
