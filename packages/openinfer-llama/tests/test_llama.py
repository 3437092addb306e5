"""The family computes what transformers computed, however a sequence is cut, and the engine serves it by its name."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from openinfer_core import FinishReason, InvalidCheckpoint, Refused, find_plugin, read_config
from openinfer_core.plugins import MODELS
from openinfer_engine.options import EngineOptions, LoadFormat, LoopHost
from openinfer_engine.testing import ask_launched, check_family
from openinfer_llama import Llama
from openinfer_llama.rope import Llama3Scaling, rope_table

FIXTURE = Path(__file__).parent / "fixture"
"""A model of two layers and the logits that transformers computed with it, in float32: `tools/golden/llama.py`."""
MISTRAL = Path(__file__).parent / "fixture_mistral"
"""The same of a Mistral with a window of 21 tokens, for a sequence of 90."""


@pytest.fixture(scope="module")
def recorded() -> tuple[list[int], np.ndarray]:
    with np.load(FIXTURE / "logits.npz", allow_pickle=False) as arrays:
        return arrays["token_ids"].tolist(), arrays["logits"]


def test_logits_are_the_references_however_the_sequence_is_computed(recorded: tuple[list[int], np.ndarray]) -> None:
    check_family(Llama.definition, FIXTURE, *recorded, tolerance=1e-4, ranks=(2,))


@pytest.fixture(scope="module")
def recorded_mistral() -> tuple[list[int], np.ndarray]:
    with np.load(MISTRAL / "logits.npz", allow_pickle=False) as arrays:
        return arrays["token_ids"].tolist(), arrays["logits"]


def test_mistral_attends_to_its_window(recorded_mistral: tuple[list[int], np.ndarray]) -> None:
    check_family(Llama.definition, MISTRAL, *recorded_mistral, tolerance=1e-4, ranks=(2,))


@pytest.mark.parametrize("window", ["20", "22", "null"])
def test_the_check_sees_another_window(
    recorded_mistral: tuple[list[int], np.ndarray], tmp_path: Path, window: str
) -> None:
    for name in ("config.json", "model.safetensors"):
        changed = (MISTRAL / name).read_bytes().replace(b'"sliding_window": 21', f'"sliding_window": {window}'.encode())
        (tmp_path / name).write_bytes(changed)
    with pytest.raises(AssertionError, match="1 ranks, whole: logits differ by"):
        check_family(Llama.definition, tmp_path, *recorded_mistral, tolerance=1e-4)


def test_engine_frees_what_mistrals_window_has_left_and_answers_as_the_reference(
    recorded_mistral: tuple[list[int], np.ndarray],
) -> None:
    token_ids, logits = recorded_mistral
    # the whole sequence takes 12 blocks of 8 tokens, its window 4 or 5
    options = EngineOptions(engine_host=LoopHost.THREAD, num_blocks=8, block_size_tokens=8, max_num_seqs=2)
    options = msgspec.structs.replace(options, max_step_tokens=16)
    answer = ask_launched(find_plugin(MODELS, "llama").load()(), MISTRAL, options, token_ids)
    assert answer.token_ids == [int(logits[-1].argmax())]


@pytest.mark.parametrize(
    ("change", "window"),
    [
        ({}, 21),
        ({"sliding_window": None}, None),
        ({"sliding_window": ...}, 4096),
        ({"sliding_window": ..., "model_type": "llama"}, None),
    ],
)
def test_window_is_that_of_the_config_or_of_mistrals_class(change: dict[str, object], window: int | None) -> None:
    config = {key: value for key, value in {**read_config(MISTRAL), **change}.items() if value is not ...}
    assert Llama.definition.parse(config).window == window


def test_the_check_sees_a_wrong_base_of_the_rotation(recorded: tuple[list[int], np.ndarray], tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((FIXTURE / name).read_bytes().replace(b"500000.0", b"400000.0"))
    with pytest.raises(AssertionError, match="1 ranks, whole: logits differ by"):
        check_family(Llama.definition, tmp_path, *recorded, tolerance=1e-4)


@pytest.mark.parametrize("load_format", LoadFormat)
def test_engine_finds_the_family_by_its_name_and_generates(
    recorded: tuple[list[int], np.ndarray], load_format: LoadFormat
) -> None:
    token_ids, logits = recorded
    family = find_plugin(MODELS, "llama").load()()
    assert family.refusal(read_config(FIXTURE)) is None
    options = EngineOptions(engine_host=LoopHost.THREAD, num_blocks=32, max_num_seqs=4, load_format=load_format)
    answer = ask_launched(family, FIXTURE, options, token_ids)
    assert answer.finished is not None
    assert answer.finished.reason is FinishReason.LENGTH
    if load_format is not LoadFormat.DUMMY:
        assert answer.token_ids == [int(logits[-1].argmax())]


def test_plan_shows_the_engine_without_loading_it() -> None:
    plan = Llama().plan(FIXTURE, EngineOptions(num_blocks=20))
    assert (plan.model_type, plan.limits["max_model_tokens"]) == ("llama", 256)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"model_type": "mixtral"}, Refused, "not a llama model"),
        ({"sliding_window": 4096}, Refused, "sliding_window is 4096, which is not served"),
        ({"model_type": "mistral", "sliding_window": 0}, InvalidCheckpoint, "sliding_window"),
        ({"attention_bias": True}, Refused, "attention_bias is True, which is not served"),
        ({"hidden_act": "gelu"}, Refused, "only silu is served"),
        ({"rms_norm_eps": 0}, InvalidCheckpoint, "rms_norm_eps"),
        ({"rope_parameters": {"rope_type": "yarn"}}, InvalidCheckpoint, "'yarn' is not supported"),
    ],
)
def test_what_it_does_not_compute_is_refused(change: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Llama.definition.parse({**read_config(FIXTURE), **change})


def test_ranks_that_do_not_divide_the_heads_are_refused() -> None:
    config = Llama.definition.parse(read_config(FIXTURE))
    with pytest.raises(Refused, match="3 ranks cannot share the model: num_key_value_heads is 2"):
        Llama.definition.check_ranks(config, 3)


def test_scaling_slows_long_waves_alone() -> None:
    scaling = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
    plain = rope_table(500000.0, None, head_dim=16, positions=2)
    slowed = rope_table(500000.0, scaling, head_dim=16, positions=2)
    angles = np.arctan2(slowed[1, 1], slowed[0, 1]) / np.arctan2(plain[1, 1], plain[0, 1])
    np.testing.assert_allclose(angles[[0, -1]], [1, 1 / 8], rtol=1e-4)
    assert np.all(np.diff(angles) <= 1e-6)
