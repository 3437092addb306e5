"""Quantised checkpoints, on one rank and on two, against float32 of what they stand for."""

from pathlib import Path

import pytest

from openinfer_engine.testing import check_quantised
from openinfer_qwen35.family import Qwen35Definition, Qwen35MoeDefinition

MIXTURES = Path(__file__).parent / "fixtures_moe"


@pytest.mark.parametrize(
    ("scheme", "plain"),
    [
        ("fp8 blocks BF16", ("in_proj_a", "in_proj_b")),
        ("fp8 blocks BF16", ("in_proj_a", "in_proj_b", "out_proj")),
        ("w4a16", ()),
        ("w8a8", ()),
        ("gptq v1", ("in_proj_a", "in_proj_b")),
        ("mxfp4", ()),
        ("nvfp4", ()),
    ],
    ids=["as published", "third party", "all in one product", "int8", "gptq", "mxfp4", "nvfp4"],
)
@pytest.mark.parametrize("name", ["text_tied", "vision_language"])
def test_quantised_model_computes_with_what_its_weights_stand_for(
    fixtures: Path, tmp_path: Path, name: str, scheme: str, plain: tuple[str, ...]
) -> None:
    """Published FP8 leaves the rows of `a` and `b` in BF16, which otherwise are of one product with FP8 ones."""
    tolerance = 5e-4 if plain else 0  # of logits up to 6: two products are rounded otherwise than one
    folder = tmp_path / "model"
    check_quantised(Qwen35Definition(), fixtures / name, folder, scheme, plain=plain, tolerance=tolerance)


@pytest.mark.parametrize(
    ("scheme", "plain"),
    [
        ("fp8 blocks BF16", ("in_proj_a", "in_proj_b")),
        ("w8a8", ()),
        ("gptq v1 asymmetric", ("in_proj_a", "in_proj_b")),
        ("mxfp4", ()),
    ],
)
def test_quantised_mixture_computes_with_what_its_weights_stand_for(
    tmp_path: Path, scheme: str, plain: tuple[str, ...]
) -> None:
    """Experts one by one, as quantised ones are published, and the shared one."""
    tolerance, folder = 5e-4 if plain else 0, tmp_path / "model"
    check_quantised(Qwen35MoeDefinition(), MIXTURES / "text", folder, scheme, group=8, plain=plain, tolerance=tolerance)


@pytest.mark.parametrize("scheme", ["fp8 blocks BF16", "w4a16 channel"])
def test_mixture_whose_shared_expert_stays_in_bf16_computes_with_what_its_weights_stand_for(
    tmp_path: Path, scheme: str
) -> None:
    """As experts alone are often quantised: the shared one is then no expert of theirs."""
    plain = ("self_attn", "linear_attn", "shared_expert")
    check_quantised(Qwen35MoeDefinition(), MIXTURES / "text", tmp_path / "model", scheme, plain=plain, tolerance=5e-4)
