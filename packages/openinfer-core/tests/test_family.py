"""Exactly one family claims a config, or the message says which and what to do."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from openinfer_core import InvalidCheckpoint, UnclaimedModel, claim, read_config
from openinfer_core.engine import EngineHandle
from openinfer_core.family import FamilyPlan


class FakeFamily:
    """Refuses with a fixed sentence, or claims everything."""

    options_type = msgspec.Struct

    def __init__(self, name: str, refusal: str | None) -> None:
        self.name = name
        self._refusal = refusal

    def refusal(self, config: Mapping[str, Any]) -> str | None:
        return self._refusal

    def plan(self, model_dir: Path, options: msgspec.Struct) -> FamilyPlan:
        raise NotImplementedError

    def launch(self, model_dir: Path, options: msgspec.Struct) -> EngineHandle:
        raise NotImplementedError


LLAMA = FakeFamily("llama", "not of the llama architecture")
QWEN3 = FakeFamily("qwen3", None)


def refusal_of(config: dict[str, Any], *families: FakeFamily) -> str:
    with pytest.raises(UnclaimedModel) as caught:
        claim(config, families)
    return str(caught.value)


def test_claim_returns_the_one_family_that_does_not_refuse() -> None:
    assert claim({"model_type": "qwen3"}, [LLAMA, QWEN3]) is QWEN3


def test_claim_by_two_families_names_both_and_the_flag() -> None:
    message = refusal_of({"model_type": "qwen3"}, QWEN3, LLAMA, FakeFamily("better-qwen3", None))
    assert message == "model_type 'qwen3' is claimed by better-qwen3, qwen3; choose one with --family NAME"


def test_claim_by_nobody_names_the_package_that_would() -> None:
    message = refusal_of({"model_type": "qwen3"}, LLAMA)
    assert message == "no installed family serves model_type 'qwen3'; install it with: pip install openinfer-qwen3"


def test_claim_of_an_unknown_model_type_gives_each_familys_reason() -> None:
    message = refusal_of({"model_type": "gpt2"}, LLAMA, FakeFamily("bert", "not a bert"))
    assert message == (
        "no installed family serves model_type 'gpt2'; bert: not a bert; llama: not of the llama architecture"
    )


def test_claim_does_not_advise_to_install_what_is_installed() -> None:
    message = refusal_of({"model_type": "qwen3"}, FakeFamily("qwen3", "not Qwen3ForCausalLM"))
    assert "pip install" not in message
    assert "qwen3: not Qwen3ForCausalLM" in message


def test_claim_refused_by_its_own_family_says_only_that_reason() -> None:
    message = refusal_of({"model_type": "qwen3"}, LLAMA, FakeFamily("qwen3", "sliding window attention is not served"))
    assert message == "qwen3: sliding window attention is not served"


def test_claim_without_families_or_model_type_says_so() -> None:
    assert refusal_of({}) == "no installed family serves model_type None; none is installed"


def test_read_config_returns_the_object(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "x": [1]}')
    assert read_config(tmp_path) == {"model_type": "qwen3", "x": [1]}


@pytest.mark.parametrize("content", ["[1]", "{", "", '"a"'])
def test_read_config_of_what_is_no_json_object_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(InvalidCheckpoint, match="is not a JSON object"):
        read_config(tmp_path)


def test_read_config_of_a_folder_without_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidCheckpoint, match=r"has no config\.json"):
        read_config(tmp_path / "nowhere")
