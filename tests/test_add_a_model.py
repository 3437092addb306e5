"""The page `docs/reference/add-a-model.md` is true: its code is the example's and runs, its files exist."""

import re
import tomllib
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest

from openinfer.commands.main import main

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "packages" / "openinfer-llama"
PAGE = (ROOT / "docs" / "reference" / "add-a-model.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def test_attention_of_the_page_is_the_examples() -> None:
    attention, _ = blocks("python")
    assert indent(attention, "    ") in (EXAMPLE / "src" / "openinfer_llama" / "model.py").read_text(encoding="utf-8")


def test_proof_of_the_page_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(blocks("python")[1], "add-a-model.md", "exec"), names)
    names["test_logits_are_the_references_however_the_sequence_is_computed"]()


def test_entry_point_of_the_page_is_the_examples() -> None:
    (written,) = blocks("toml")
    installed = tomllib.loads((EXAMPLE / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    assert tomllib.loads(written)["project"]["entry-points"] == installed


def test_files_that_the_page_names_are_there() -> None:
    operators = ROOT / "packages" / "openinfer-kernels" / "src" / "openinfer_kernels" / "ops"
    named = re.findall(r"^\|.*\| `(\w+\.py)` \|$", PAGE, re.MULTILINE)
    assert len(named) == 7
    for file in named:
        assert (operators / file).is_file(), file
    for link in re.findall(r"\]\(([^)]+)\)", PAGE):
        assert (ROOT / "docs" / "reference" / link.partition("#")[0]).exists(), link


def test_command_of_the_page_plans_the_examples_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", str(EXAMPLE / "tests" / "fixture")]) == 0
    assert "openinfer-llama" in capsys.readouterr().out
