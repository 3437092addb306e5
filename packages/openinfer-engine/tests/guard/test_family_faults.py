"""A family of another package that is wrong: its start and its steps say whose fault it was, and where."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from openinfer_core import BrokenPlugin, GenerateRequest, Refused, RequestId, SamplingParams, find_plugin
from openinfer_core.errors import ContractViolation
from openinfer_engine import EngineFamily, EngineOptions, build_loop, plan, resolve
from openinfer_engine.launch import launch
from openinfer_engine.model import Model, ModelDefinition, ModelModule
from openinfer_engine.options import LoopHost
from openinfer_engine.testing import FamilyHarness
from openinfer_kernels import Array
from openinfer_kernels.cpu import CpuOps
from openinfer_qwen3 import model as qwen3
from openinfer_qwen3.family import Qwen3Definition

OPTIONS = EngineOptions(num_blocks=64, engine_host=LoopHost.THREAD)


class NoSpec(Qwen3Definition):
    def kv_spec(self, *given: Any, **keywords: Any) -> Any:
        raise TypeError("no heads here")


class NoLoad(Qwen3Definition):
    def load(self, *given: Any, **keywords: Any) -> Model:
        return cast("Model", {}["layers"])


class Refusing(Qwen3Definition):
    def kv_spec(self, *given: Any, **keywords: Any) -> Any:
        raise Refused("heads of that size are not served")


class Wrong(qwen3.Qwen3Model):
    """What a subclass answers in the place of hidden states or logits."""

    def forward(self, *given: Any, **keywords: Any) -> Array:
        return self.wrong_hidden(super().forward(*given, **keywords))

    def logits(self, hidden: Array) -> Array:
        return self.wrong_logits(super().logits(hidden))

    def wrong_hidden(self, hidden: Array) -> Any:
        return hidden

    def wrong_logits(self, logits: Array) -> Any:
        return logits


class Nothing(Wrong):
    def wrong_hidden(self, hidden: Array) -> Any:
        del hidden


class LastRow(Wrong):
    def wrong_hidden(self, hidden: Array) -> Any:
        return hidden[-1:]


class OneRanksShare(Wrong):
    def wrong_logits(self, logits: Array) -> Any:
        return logits[:, :100]


class Double(Wrong):
    def wrong_logits(self, logits: Array) -> Any:
        return logits.astype(np.float64)


class Raising(Wrong):
    def wrong_hidden(self, hidden: Array) -> Any:
        raise ZeroDivisionError("not today")


def definition_of(model: type[Wrong]) -> Qwen3Definition:
    def load(config: Any, weights: Any, *, ops: Any, communicator: Any, max_model_tokens: int) -> Model:
        keywords = {"ops": ops, "communicator": communicator}
        loaded = qwen3.load(config, weights, max_model_tokens=max_model_tokens, **keywords)
        return model(config, loaded.weights, **keywords)

    class Definition(Qwen3Definition):
        module = cast("ModelModule", SimpleNamespace(tensors=qwen3.tensors, load=load))

    return Definition()


@pytest.fixture(scope="module")
def tiny() -> Path:
    return find_plugin("openinfer.checkpoints", "tiny").load()()


def step(definition: Qwen3Definition, model_dir: Path) -> None:
    """Plans and runs the first step of a request of three tokens."""
    loop = build_loop(resolve(definition, model_dir, OPTIONS))
    try:
        sampling = SamplingParams(max_tokens=2, temperature=0)
        loop.submit(GenerateRequest(request_id=RequestId(1), prompt_token_ids=(72, 73, 74), sampling=sampling))
        while loop.busy:
            loop.step()
    finally:
        loop.close()


def test_raising_hook_is_named_with_class_function_and_line(tiny: Path) -> None:
    with pytest.raises(BrokenPlugin) as planned:
        plan(NoSpec(), tiny, OPTIONS)
    assert "the family qwen3 (" in str(planned.value)
    assert "test_family_faults.NoSpec) failed in NoSpec.kv_spec (" in str(planned.value)
    assert str(planned.value).endswith("): TypeError: no heads here")
    assert isinstance(planned.value.__cause__, TypeError)
    with pytest.raises(BrokenPlugin, match=r"NoSpec\.kv_spec .*test_family_faults\.py:\d+\): TypeError: no heads"):
        launch(NoSpec(), tiny, OPTIONS)


def test_raising_load_is_named(tiny: Path) -> None:
    with pytest.raises(BrokenPlugin, match=r"failed in NoLoad\.load \(.*\): KeyError: 'layers'"):
        launch(NoLoad(), tiny, OPTIONS)


@pytest.mark.parametrize("error", [OSError("the disk is gone"), MemoryError("no more")])
def test_what_we_could_not_read_or_hold_is_no_fault_of_the_family(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails(self: CpuOps, *parts: Any) -> Array:
        raise error

    monkeypatch.setattr(CpuOps, "upload_weight", fails)
    with pytest.raises(type(error), match=str(error)):
        launch(Qwen3Definition(), tiny, OPTIONS)


def test_file_that_the_family_could_not_read_is_its_own(tiny: Path) -> None:
    class Reading(Qwen3Definition):
        def load(self, *given: Any, **keywords: Any) -> Model:
            raise FileNotFoundError("rotations.bin")

    with pytest.raises(BrokenPlugin, match=r"Reading\.load \(.*\): FileNotFoundError: rotations\.bin"):
        launch(Reading(), tiny, OPTIONS)


def family(**members: Any) -> EngineFamily:
    definition = type("Mine", (Qwen3Definition,), members)()
    return type("Family", (EngineFamily,), {"definition": definition})()


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ({"rank_sizes": ("num_key_value_heads")}, "rank_sizes of Mine are 'num_key_value_heads': they are a tuple"),
        ({"rank_sizes": ("num_heads",)}, r"rank_sizes of Mine are \('num_heads',\): .* names that Qwen3Config has"),
        ({"config_type": dict}, "config_type of Mine is <class 'dict'>, no msgspec.Struct"),
        ({"module": SimpleNamespace(load=qwen3.load)}, "Mine has no module.tensors"),
    ],
)
def test_definition_that_lacks_something_makes_no_family(members: dict[str, Any], said: str) -> None:
    with pytest.raises(TypeError, match=said):
        family(**members)


def test_definition_that_says_nothing_makes_no_family() -> None:
    class Bare(ModelDefinition[Any]):
        def refusal(self, config: Mapping[str, Any]) -> str | None:
            return None

        def kv_spec(self, *given: Any, **keywords: Any) -> Any:
            return None

    for definition, said in (
        (Bare(), r"Bare has no name, module, config_type, rank_sizes, module\.tensors, module\.load"),
        (Bare, "no instance of a ModelDefinition"),
    ):
        made = type("Family", (EngineFamily,), {"definition": definition})
        with pytest.raises(TypeError, match=said):
            made()


def test_refusal_of_a_hook_stays_what_it_is(tiny: Path) -> None:
    with pytest.raises(Refused, match=r"^heads of that size are not served$"):
        plan(Refusing(), tiny, OPTIONS)


def test_what_a_step_raises_has_the_familys_name(tiny: Path) -> None:
    with pytest.raises(ZeroDivisionError) as raised:
        step(definition_of(Raising), tiny)
    (note,) = raised.value.__notes__
    assert note.startswith("raised in a step of the family qwen3 (")


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Nothing, r"Nothing\.forward gave NoneType for 3 tokens, not \[T, h\]"),
        (LastRow, r"LastRow\.forward gave \[1, 192\] float32 for 3 tokens"),
        (OneRanksShare, r"OneRanksShare\.logits gave \[\d, 100\] float32, not \[\d, 2048\] float32"),
        (Double, r"Double\.logits gave \[\d, 2048\] float64, not \[\d, 2048\] float32"),
    ],
)
def test_wrong_shapes_are_refused_in_a_step_and_by_the_kit(tiny: Path, model: type[Wrong], said: str) -> None:
    with pytest.raises(ContractViolation, match=said):
        step(definition_of(model), tiny)
    with pytest.raises(ContractViolation, match=said):
        FamilyHarness(definition_of(model), tiny).step({"a": [72, 73, 74]})
