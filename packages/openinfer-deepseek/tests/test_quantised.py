"""Quantised checkpoints, on one rank and on two, against float32 of what they stand for."""

from pathlib import Path

import pytest

from openinfer_deepseek.family import DeepseekV3Definition
from openinfer_engine.testing import check_quantised

MOONLIGHT = Path(__file__).parent / "fixtures_v3" / "moonlight"


@pytest.mark.parametrize("scheme", ["fp8 blocks F8_E8M0", "fp8 per channel", "w4a16 channel", "w8a8"])
def test_quantised_model_computes_with_what_its_weights_stand_for(tmp_path: Path, scheme: str) -> None:
    """Experts, which are spread whole, and latents, of which one matrix is taken apart."""
    words = ("down_proj",) if scheme == "w4a16 channel" else ()  # 11 words of 8 inputs are not cut into two
    check_quantised(DeepseekV3Definition(), MOONLIGHT, tmp_path / "model", scheme, plain=words)
