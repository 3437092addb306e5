"""Quantised checkpoints of every published layout, on one rank and on two, against float32 of what they stand for."""

from pathlib import Path

import msgspec
import pytest

from openinfer_core import InvalidCheckpoint, Refused
from openinfer_engine.options import EngineOptions, LoadFormat, LoopHost
from openinfer_engine.testing import FamilyHarness, check_quantised
from openinfer_engine.testing.quantised_checkpoints import SCHEMES, write_quantised
from openinfer_engine.testing.quantised_family import projections
from openinfer_qwen3.family import Qwen3, Qwen3Definition, Qwen3MoeDefinition

MIXTURES = Path(__file__).parent / "fixtures_moe"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantised_model_computes_with_what_its_weights_stand_for(fixtures: Path, tmp_path: Path, scheme: str) -> None:
    check_quantised(Qwen3Definition(), fixtures / "tied", tmp_path / "model", scheme)


@pytest.mark.parametrize("scheme", ["fp8 blocks BF16", "w4a16 channel", "nvfp4", "awq", "gptq v1", "mxfp4", "w8a8"])
def test_quantised_mixture_computes_with_what_its_weights_stand_for(tmp_path: Path, scheme: str) -> None:
    folder = tmp_path / "model"
    check_quantised(Qwen3MoeDefinition(), MIXTURES / "mixture", folder, scheme, group=16, plain=("down_proj",))


def test_biases_next_to_quantised_weights_are_refused(fixtures: Path, tmp_path: Path) -> None:
    source, target = fixtures / "attention_bias", tmp_path / "model"
    write_quantised(source, target, SCHEMES["w4a16"], projections(source))
    with pytest.raises(Refused, match="biases next to quantised weights"):
        FamilyHarness(Qwen3Definition(), target)


def test_projection_that_is_stored_otherwise_than_those_it_is_multiplied_with_is_refused(
    fixtures: Path, tmp_path: Path
) -> None:
    with pytest.raises(InvalidCheckpoint, match=r"multiplied as one are stored in several formats: .*k_proj plain"):
        check_quantised(Qwen3Definition(), fixtures / "tied", tmp_path / "model", "w4a16", plain=("k_proj",))


@pytest.mark.parametrize(
    ("scheme", "described"),
    [
        ("awq", "int4 in groups of 1 x 32 with f16 scales and zero points"),
        ("gptq v1", "int4 in groups of 1 x 32 with f16 scales"),
        ("fp8 per tensor static", "e4m3 in groups of all x all with f32 scales"),
        ("nvfp4", "e2m1 in groups of 1 x 16 with e4m3 scales and a global scale"),
    ],
)
def test_plan_shows_the_format_and_its_bytes(fixtures: Path, tmp_path: Path, scheme: str, described: str) -> None:
    source, target = fixtures / "tied", tmp_path / "model"
    names = projections(source)
    write_quantised(source, target, SCHEMES[scheme], names)
    options = EngineOptions(engine_host=LoopHost.THREAD, num_blocks=8, block_size_tokens=8, max_num_seqs=2)
    options = msgspec.structs.replace(options, max_step_tokens=16)
    bytes_of = {}
    for load_format in (LoadFormat.SAFETENSORS, LoadFormat.DUMMY):
        planned = Qwen3().plan(target, msgspec.structs.replace(options, load_format=load_format))
        counted = f"{len(names)} matrices of " if load_format is LoadFormat.SAFETENSORS else ""
        assert planned.parts["weight_format"] == f"{counted}{described}"
        bytes_of[load_format] = planned.memory_bytes["weights"]
    plain = Qwen3().plan(source, options)
    assert "weight_format" not in plain.parts
    assert bytes_of[LoadFormat.SAFETENSORS] == pytest.approx(bytes_of[LoadFormat.DUMMY], rel=0.05)  # GPTQ's g_idx
    assert bytes_of[LoadFormat.SAFETENSORS] < 0.6 * plain.memory_bytes["weights"]
