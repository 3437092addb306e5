"""Quantised checkpoints, on one rank and on two, against float32 of what they stand for."""

from pathlib import Path

import pytest

from openinfer_engine.testing import check_quantised
from openinfer_llama import Llama

FIXTURE = Path(__file__).parent / "fixture"


@pytest.mark.parametrize("scheme", ["fp8 per tensor static", "fp8 per channel", "w8a8", "nvfp4", "gptq v1 one group"])
def test_quantised_model_computes_with_what_its_weights_stand_for(tmp_path: Path, scheme: str) -> None:
    check_quantised(Llama.definition, FIXTURE, tmp_path / "model", scheme)
