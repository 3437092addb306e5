"""The page `docs/reference/swap-a-kernel.md` is true: its code runs, conforms, is the example's and is used."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from openinfer.commands.main import main
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
    provider, kit = blocks("python")
    exec(compile(provider + kit, "swap-a-kernel.md", "exec"), names)
    names["test_provider_conforms"]()
    check_kernel_provider(names["ExactNorm"], CpuOps(), architecture="cpu")
    source = (EXAMPLE / "src" / "openinfer_exact_norm" / "provider.py").read_text(encoding="utf-8")
    assert provider[provider.index("class ExactNorm") :] in source


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
