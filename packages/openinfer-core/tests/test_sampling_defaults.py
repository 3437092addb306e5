"""What `generation_config.json` makes the default, and what beats it."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from openinfer_core import InvalidCheckpoint, SamplingParams
from openinfer_core.sampling_defaults import (
    NO_DEFAULTS,
    SamplingDefaultsFrom,
    read_sampling_defaults,
)

QWEN3 = {
    "bos_token_id": 151643,
    "do_sample": True,
    "eos_token_id": [151645, 151643],
    "pad_token_id": 151643,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "transformers_version": "4.51.0",
}
NEUTRAL = {name: getattr(SamplingParams(max_tokens=1), name) for name in NO_DEFAULTS.resolve({})}


@pytest.fixture
def folder(tmp_path: Path) -> Any:
    def write(config: Any) -> Path:
        (tmp_path / "generation_config.json").write_text(config if isinstance(config, str) else json.dumps(config))
        return tmp_path

    return write


def test_without_a_file_nothing_is_changed(tmp_path: Path) -> None:
    assert read_sampling_defaults(tmp_path) == NO_DEFAULTS
    assert NO_DEFAULTS.resolve({}) == NEUTRAL


def test_a_model_is_sampled_as_its_publisher_says(folder: Any) -> None:
    defaults = read_sampling_defaults(folder(QWEN3))
    assert defaults.values == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    assert defaults.resolve({"top_p": None}) == NEUTRAL | defaults.values
    assert defaults.described == "temperature 0.6, top_k 20, top_p 0.95"
    assert read_sampling_defaults(folder(QWEN3), SamplingDefaultsFrom.NONE) == NO_DEFAULTS


@pytest.mark.parametrize("top_k", [-1, 0])
def test_what_is_given_beats_the_default_also_where_it_switches_it_off(folder: Any, top_k: int) -> None:
    defaults = read_sampling_defaults(folder(QWEN3))
    given = {"top_k": top_k, "top_p": 1.0, "temperature": 1.0}
    assert defaults.resolve(given) == NEUTRAL
    SamplingParams(max_tokens=1, **defaults.resolve(given))


def test_a_model_that_is_not_to_be_sampled_is_greedy_unless_a_temperature_is_given(folder: Any) -> None:
    defaults = read_sampling_defaults(folder({"do_sample": False, "temperature": 0.6, "top_p": 0.9}))
    assert defaults.values == {"temperature": 0.0, "top_p": 0.9}
    assert defaults.resolve({"temperature": 0.7})["temperature"] == 0.7
    assert read_sampling_defaults(folder({"temperature": 0.6})).values == {"temperature": 0.6}


def test_keys_that_are_not_known_here_are_named_and_neutral_ones_are_not(
    folder: Any, caplog: pytest.LogCaptureFixture
) -> None:
    config = QWEN3 | {"typical_p": 0.9, "num_beams": 1, "length_penalty": 1.0, "guidance_scale": None, "top_h": 0.4}
    with caplog.at_level(logging.WARNING, logger="openinfer"):
        assert read_sampling_defaults(folder(config)).unknown == ("top_h", "typical_p")
    assert "asks for what is not known here, and is not done: top_h, typical_p" in caplog.text


@pytest.mark.parametrize(
    "config",
    [
        "[]",
        "{",
        {"temperature": "0.6"},
        {"temperature": -1},
        {"top_p": 0},
        {"top_k": 0.5},
        {"top_k": True},
        '{"min_p": NaN}',
    ],
)
def test_a_file_that_no_request_could_follow_is_refused(folder: Any, config: Any) -> None:
    with pytest.raises(InvalidCheckpoint, match=r"generation_config\.json"):
        read_sampling_defaults(folder(config))
