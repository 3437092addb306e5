"""Logits against those that transformers' `DeepseekV2ForCausalLM` computed, however a sequence is cut into steps.

`tools/golden/deepseek_v2.py` recorded them in float32; the largest are about 7. The largest difference
seen here was 5.1e-5.
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


def test_recorded_sequences_are_long_and_their_logits_far_from_flat(golden: Golden) -> None:
    assert [len(golden.tokens(sequence)) for sequence in golden.sequences] == [150, 41, 7]
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


@pytest.mark.parametrize("chunk", [1, 7, 39, 40, 149])
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


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_together_give_the_recorded_logits(model_dir: Path, golden: Golden, harness: Any, ranks: int) -> None:
    """Also the ranks against one rank, and 271 rows of vocabulary, which do not divide by them."""
    one, several = harness(model_dir), harness(model_dir, ranks=ranks)
    tokens = golden.tokens("0")
    steps = [tokens[:60], tokens[60:63], *([token] for token in tokens[63:70]), tokens[70:]]
    expected = np.concatenate([one.step({"0": step})["0"] for step in steps])
    logits = np.concatenate([several.step({"0": step})["0"] for step in steps])
    assert np.abs(logits - expected).max() < TOLERANCE
    assert golden.error("0", logits) < TOLERANCE


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
    golden = Golden(fixtures / name)
    logits = harness(fixtures / name, change=change).step({"0": golden.tokens("0")})["0"]
    assert golden.error("0", logits) > 10 * TOLERANCE
