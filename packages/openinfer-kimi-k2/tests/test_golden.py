"""Logits against those that transformers' `DeepseekV3ForCausalLM` computed, however a sequence is cut into steps.

`tools/golden/kimi_k2.py` recorded them in float32.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from openinfer_engine.testing import FamilyHarness, check_family
from openinfer_kimi_k2 import KimiK2

FIXTURES = Path(__file__).parent / "fixtures"
TOLERANCE = 1e-4


def recorded(name: str) -> tuple[list[int], np.ndarray]:
    with np.load(FIXTURES / name / "logits.npz", allow_pickle=False) as arrays:
        return arrays["token_ids"].tolist(), arrays["logits"]


@pytest.mark.parametrize("name", ["plain", "groups", "fp8", "int4"])
def test_logits_are_the_references_however_the_sequence_is_computed(name: str) -> None:
    token_ids, logits = recorded(name)
    assert logits.std() > 0.5
    check_family(KimiK2.definition, FIXTURES / name, token_ids, logits, tolerance=TOLERANCE, ranks=(2, 4, 8))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("plain", {"rope_theta": 20000.0}),
        ("plain", {"rms_norm_eps": 1e-3}),
        ("plain", {"routed_scaling_factor": 2.8}),
        ("plain", {"num_experts_per_tok": 3}),
        ("plain", {"norm_topk_prob": False}),
        ("groups", {"topk_group": 3}),
        ("groups", {"n_group": 1, "topk_group": 1}),
    ],
)
def test_recorded_logits_notice_a_config_that_is_slightly_off(name: str, change: dict[str, Any]) -> None:
    token_ids, logits = recorded(name)
    harness = FamilyHarness(KimiK2.definition, FIXTURES / name, change=change)
    assert np.abs(harness.step({"0": token_ids})["0"] - logits).max() > 10 * TOLERANCE
