"""The page `docs/reference/swap-a-kernel.md` is true: its code runs, conforms, is the example's and is used."""

import importlib
import json
import re
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from openinfer.commands.main import main
from openinfer_core import InvalidRequest, Refused
from openinfer_core.errors import UnknownPlugin
from openinfer_engine.options import DeviceKind, EngineOptions, LoopHost
from openinfer_engine.testing import ask_launched, check_family
from openinfer_kernels.cpu import CpuOps
from openinfer_kernels.testing.providers import check_kernel_provider

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "openinfer-exact-norm"
PAGE = (ROOT / "docs" / "reference" / "swap-a-kernel.md").read_text(encoding="utf-8")
ASKED = ["--model", "tiny", "--kernel-providers", "rms_norm=exact-norm,add_rms_norm=exact-norm"]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def test_provider_of_the_page_conforms_and_is_the_examples() -> None:
    names: dict[str, Any] = {"__name__": "page"}
    provider, kit, *_ = blocks("python")
    exec(compile(provider + kit, "swap-a-kernel.md", "exec"), names)
    names["test_provider_conforms"]()
    check_kernel_provider(names["ExactNorm"], CpuOps(), architecture="cpu")
    source = (EXAMPLE / "src" / "openinfer_exact_norm" / "provider.py").read_text(encoding="utf-8")
    assert provider[provider.index("class ExactNorm") :] in source


@pytest.fixture
def page() -> dict[str, Any]:
    """What the page's code defines, run from top to bottom."""
    names: dict[str, Any] = {"__name__": "page", "PrimerConfig": object}
    for code in blocks("python"):
        exec(compile(code, "swap-a-kernel.md", "exec"), names)
    return names


def test_added_operator_of_the_page_conforms(page: dict[str, Any]) -> None:
    page["test_added_operator_conforms"]()


FAMILY = """
from openinfer_engine import EngineFamily
from openinfer_engine.options import DeviceKind
from openinfer_llama.family import LlamaDefinition


class Squared:
    def __init__(self, inner, ops):
        self.forward, self._inner, self._ops = inner.forward, inner, ops

    def logits(self, hidden):
        return self._ops.extra["squared_relu"](self._inner.logits(hidden))


class Definition(LlamaDefinition):
    name = "squared"
    devices = frozenset({DeviceKind.CPU})
    extra_operators = {"squared_relu": "squared-relu"}

    def refusal(self, config):
        if config.get("model_type") != "squared":
            return "not a squared model"
        return super().refusal({**config, "model_type": "llama"})

    def load(self, config, weights, *, ops, **named):
        return Squared(super().load(config, weights, ops=ops, **named), ops)


class Family(EngineFamily):
    definition = Definition()
"""
"""Llama, whose logits are squared."""
FIXTURE = ROOT / "packages" / "openinfer-llama" / "tests" / "fixture"


@pytest.fixture
def squared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A family that calls the page's operator, in a package with its provider; the class of its entry point."""
    provider, _, added, *_ = blocks("python")
    folder = tmp_path / "site-packages"
    distribution = folder / "squared-1.0.dist-info"
    distribution.mkdir(parents=True)
    (folder / "squared.py").write_text(f"OPENINFER_CONTRACT = 1\n{provider}\n\n{added}\n{FAMILY}")
    (distribution / "METADATA").write_text("Metadata-Version: 2.1\nName: squared\nVersion: 1.0\n")
    (distribution / "entry_points.txt").write_text(
        "[openinfer.models]\nsquared = squared:Family\n\n"
        "[openinfer.kernel_providers]\nsquared-relu = squared:SquaredRelu\nexact = squared:ExactNorm\n"
    )
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "squared", raising=False)
    return importlib.import_module("squared").Family


@pytest.fixture
def squared_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(FIXTURE, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "squared"}))
    return folder


def test_family_calls_an_operator_that_its_package_adds(squared: Any, squared_dir: Path) -> None:
    with np.load(FIXTURE / "logits.npz", allow_pickle=False) as recorded:
        token_ids, logits = recorded["token_ids"].tolist(), recorded["logits"]
    expected = np.maximum(logits, 0) ** 2
    check_family(squared.definition, squared_dir, token_ids, expected, tolerance=1e-3, ranks=(2,))
    options = EngineOptions(engine_host=LoopHost.THREAD, num_blocks=32, max_num_seqs=4)
    assert squared().plan(squared_dir, options).parts["operator squared_relu"] == "squared-relu (squared 1.0)"
    answer = ask_launched(squared(), squared_dir, options, token_ids, logprobs=1)
    assert answer.token_ids == [int(expected[-1].argmax())]
    assert answer.logprobs[0].logprob == pytest.approx(log_probabilities(expected[-1]).max(), abs=1e-3)


def log_probabilities(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64) - logits.max()
    return wide - np.log(np.exp(wide).sum())


def test_family_is_refused_where_it_or_its_operators_do_not_run(
    squared: Any, squared_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_gpu = EngineOptions(device=DeviceKind.CUDA, engine_host=LoopHost.THREAD)
    for ask in (squared().plan, squared().launch):
        with pytest.raises(Refused, match="the family squared does not run on the device cuda; possible: cpu"):
            ask(squared_dir, on_a_gpu)
    with pytest.raises(Refused, match=r"--batch-invariant is kept by our own operators; .* calls squared_relu"):
        squared().plan(squared_dir, EngineOptions(batch_invariant=True))
    with pytest.raises(InvalidRequest, match="the operator 'squared_relu'; possible are add_rms_norm"):
        squared().plan(squared_dir, EngineOptions(kernel_providers={"squared_relu": "exact-norm"}))
    monkeypatch.setattr(type(squared.definition), "extra_operators", {"squared_relu": "exact"})
    with pytest.raises(Refused, match=r"the family squared calls what its providers do not add: .*'squared_relu'"):
        squared().plan(squared_dir, EngineOptions())
    monkeypatch.setattr(type(squared.definition), "extra_operators", {"squared_relu": "nothing"})
    with pytest.raises(UnknownPlugin, match=r"no installed package offers 'nothing' in openinfer\.kernel_providers"):
        squared().plan(squared_dir, EngineOptions())


def test_entry_point_of_the_page_is_the_examples() -> None:
    (written,) = blocks("toml")
    installed = tomllib.loads((EXAMPLE / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    assert tomllib.loads(written)["project"]["entry-points"] == installed


def test_plan_and_lock_say_who_serves_an_operator(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lock = tmp_path / "plan.json"
    assert main(["plan", *ASKED, "--lock", str(lock)]) == 0
    assert "but add_rms_norm, rms_norm" in capsys.readouterr().out
    assert json.loads(lock.read_text())["parts"]["operator rms_norm"].startswith("exact-norm (openinfer-exact-norm ")
    assert main(["serve", "--model", "tiny", "--locked", str(lock)]) == 2
    assert "parts.operator rms_norm is None, locked 'exact-norm" in capsys.readouterr().err


def test_model_computes_with_the_provided_operators(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", *ASKED, "The capital of Italy is", "--temperature", "0", "--stop", "."]) == 0
    assert "Rome" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("rms_norm=nothing", "no installed package offers 'nothing' in openinfer.kernel_providers"),
        ("linear=exact-norm", "it does not serve linear, but add_rms_norm, rms_norm"),
        ("softmax=exact-norm", "kernel_providers names the operator 'softmax'; possible are add_rms_norm, "),
    ],
)
def test_what_cannot_be_served_is_one_line_and_code_two(
    asked: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--model", "tiny", "--kernel-providers", asked]) == 2
    assert message in capsys.readouterr().err
