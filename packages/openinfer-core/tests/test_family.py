"""Exactly one family claims a config, or the message says which and what to do."""

import logging
import sys
from collections.abc import Mapping
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import msgspec
import pytest

from openinfer_core import (
    BrokenPlugin,
    InvalidCheckpoint,
    UnclaimedModel,
    claim,
    list_plugins,
    load_family,
    read_config,
)
from openinfer_core.engine import EngineHandle
from openinfer_core.family import FamilyPlan
from openinfer_core.plugins import MODELS, Plugin

OPENINFER_CONTRACT = 1
HERE = "module_of_test_family"
sys.modules[HERE] = sys.modules[__name__]  # under a name that an entry point may have


class FakeFamily:
    """Refuses with a fixed sentence, or claims everything."""

    options_type = msgspec.Struct
    says: str | None = None

    @property
    def name(self) -> str:
        return type(self).__name__.lower()

    def refusal(self, config: Mapping[str, Any]) -> str | None:
        return self.says

    def plan(self, model_dir: Path, options: msgspec.Struct) -> FamilyPlan:
        raise NotImplementedError

    def launch(self, model_dir: Path, options: msgspec.Struct) -> EngineHandle:
        raise NotImplementedError


class Qwen3(FakeFamily):
    pass


class BetterQwen3(FakeFamily):
    pass


class Llama(FakeFamily):
    says = "not of the llama architecture"


class Bert(FakeFamily):
    says = "not a bert"


class Strict(FakeFamily):
    """Qwen3 that is not asked for in the right way."""

    name = "qwen3"
    says = "sliding window attention is not served"


class Causal(FakeFamily):
    name = "qwen3"
    says = "not Qwen3ForCausalLM"


class Raising(FakeFamily):
    """Takes a config for something that it is not."""

    def refusal(self, config: Mapping[str, Any]) -> str | None:
        return config["architectures"][0]


class Mumbling(FakeFamily):
    says = 7  # type: ignore[assignment]


class Unmakeable(FakeFamily):
    def __init__(self, device: str) -> None:
        self.device = device


class Nothing:
    name = "nothing"


def plugin_of(family: type, *, module: str = HERE) -> Plugin:
    name = getattr(family, "name", None)
    name = name if isinstance(name, str) else family.__name__.lower()
    entry_point = EntryPoint(name, f"{module}:{family.__name__}", MODELS)
    return list_plugins(MODELS, lister=lambda group: [entry_point])[0]


def refusal_of(config: dict[str, Any], *families: type) -> str:
    with pytest.raises(UnclaimedModel) as caught:
        claim(config, map(plugin_of, families))
    return str(caught.value)


def test_claim_returns_the_one_family_that_does_not_refuse() -> None:
    family, plugin = claim({"model_type": "qwen3"}, [plugin_of(Llama), plugin_of(Qwen3)])
    assert isinstance(family, Qwen3)
    assert plugin.name == "qwen3"


def test_claim_by_two_families_names_both_with_their_packages_and_the_flag() -> None:
    message = refusal_of({"model_type": "qwen3"}, Qwen3, Llama, BetterQwen3)
    here = f"{HERE}:"
    assert message == (
        f"model_type 'qwen3' is claimed by betterqwen3 ({here}BetterQwen3), qwen3 ({here}Qwen3); "
        "choose one with --family NAME"
    )


def test_claim_by_two_families_of_one_name_says_to_uninstall_one() -> None:
    entry_points = [EntryPoint("qwen3", f"{HERE}:{name}", MODELS) for name in ("Qwen3", "BetterQwen3")]
    with pytest.raises(UnclaimedModel, match=r"two have one name: uninstall all but one of these$"):
        claim({"model_type": "qwen3"}, list_plugins(MODELS, lister=lambda group: entry_points))


def test_claim_by_nobody_names_the_package_that_would() -> None:
    message = refusal_of({"model_type": "qwen3"}, Llama)
    assert message == (
        "no installed family serves model_type 'qwen3'; openinfer-qwen3 does: "
        "`./run install` in a checkout of openinfer brings it, or `install.py` in a folder of wheels"
    )


def test_claim_of_an_unknown_model_type_gives_each_familys_reason() -> None:
    assert refusal_of({"model_type": "gpt2"}, Llama, Bert) == (
        "no installed family serves model_type 'gpt2'; bert: not a bert; llama: not of the llama architecture; "
        "served here are bert, llama: take a model of one of these types, or write a family for this one "
        "(docs/reference/add-a-model.md)"
    )


def test_claim_does_not_advise_to_install_what_is_installed() -> None:
    message = refusal_of({"model_type": "qwen3"}, Causal)
    assert "install" not in message.replace("no installed", "")
    assert "qwen3: not Qwen3ForCausalLM" in message


def test_claim_refused_by_its_own_family_says_only_that_reason() -> None:
    message = refusal_of({"model_type": "qwen3"}, Llama, Strict)
    assert message == "qwen3: sliding window attention is not served"


def test_claim_without_families_or_model_type_says_so() -> None:
    assert refusal_of({}) == "no installed family serves model_type None; none is installed"


BROKEN = {
    Raising: "failed when it was asked about the model: KeyError: 'architectures'",
    Mumbling: "answered 7 when it was asked about the model: neither None nor text",
    Unmakeable: "cannot be made: TypeError: Unmakeable.__init__() missing 1 required",
    Nothing: "is no ModelFamily: it lacks launch, options_type, plan, refusal",
}


@pytest.mark.parametrize("family", BROKEN, ids=lambda family: family.__name__)
def test_broken_family_stands_in_no_other_models_way(family: type, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="openinfer.plugins"):
        found, _ = claim({"model_type": "qwen3"}, [plugin_of(family), plugin_of(Qwen3)])
    assert isinstance(found, Qwen3)
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith(f"openinfer.models plug-in {family.__name__.lower()!r} of ")
    assert BROKEN[family] in message


@pytest.mark.parametrize("family", BROKEN, ids=lambda family: family.__name__)
def test_broken_family_is_named_where_no_other_claims_the_model(family: type) -> None:
    message = refusal_of({"model_type": "qwen3"}, family, Llama)
    assert message.startswith("no installed family serves model_type 'qwen3'; openinfer.models plug-in ")
    assert BROKEN[family] in message
    assert "install" not in message.replace("no installed", "")


def test_family_of_another_contract_stands_in_no_other_models_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "family_of_contract_0.py").write_text("class Llama: name = 'llama'\n")
    monkeypatch.syspath_prepend(tmp_path)
    old = plugin_of(Llama, module="family_of_contract_0")
    found, _ = claim({"model_type": "qwen3"}, [old, plugin_of(Qwen3)])
    assert isinstance(found, Qwen3)
    assert "is written for contract 0 of openinfer.models" in caplog.text
    with pytest.raises(UnclaimedModel, match=r"no installed family .*; openinfer.models plug-in 'llama' .* contract 0"):
        claim({"model_type": "llama"}, [old])


def test_load_family_of_what_is_no_family_is_broken() -> None:
    with pytest.raises(BrokenPlugin, match="is no ModelFamily: it lacks launch"):
        load_family(plugin_of(Nothing))


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
