"""Packages of different releases in one environment: one sentence with both names, and never a traceback.

A release of its own is what `openinfer_core` is here: a copy of its modules on the path before the installed ones.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import distribution, version
from pathlib import Path

import pytest

import openinfer_core

REMEDY = "install all packages of openinfer from one release"
PLAN = ("plan", "--model", "tiny")
CORE = version("openinfer-core")


def retag(folder: Path, name: str, release: str, *, entry_points: str = "") -> None:
    """Metadata of a package as another release, found before that of the installed one."""
    info = folder / f"{name.replace('-', '_')}-{release}.dist-info"
    info.mkdir()
    metadata = distribution(name).read_text("METADATA") or ""
    (info / "METADATA").write_text(metadata.replace(f"\nVersion: {version(name)}\n", f"\nVersion: {release}\n"))
    (info / "entry_points.txt").write_text(entry_points or distribution(name).read_text("entry_points.txt") or "")


def copy_core(folder: Path, *, without: str = "", renamed: Mapping[str, tuple[str, str]] | None = None) -> None:
    """The modules of openinfer-core, as a release that lacks one, or that calls a field otherwise."""
    copy = folder / "openinfer_core"
    shutil.copytree(Path(openinfer_core.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for name, (old, new) in (renamed or {}).items():
        text = (copy / name).read_text()
        assert old in text
        (copy / name).write_text(text.replace(old, new))
    if without:
        gone = copy / without
        shutil.rmtree(gone) if gone.is_dir() else gone.unlink()


def said_by(folder: Path, *argv: str) -> str:
    """What the command says when it refuses: one line on standard error, and code 2."""
    command = [sys.executable, "-P", "-m", "openinfer.commands.main", *argv]
    environment = os.environ | {"PYTHONPATH": str(folder), "OPENINFER_LOG_LEVEL": "ERROR"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    return line


def test_newer_core_beside_the_rest_is_refused(tmp_path: Path) -> None:
    retag(tmp_path, "openinfer-core", "0.2.0")
    said = said_by(tmp_path, *PLAN)
    assert said.startswith(f"openinfer plan: openinfer {version('openinfer')} requires openinfer-core")
    assert said.endswith(f", and openinfer-core 0.2.0 is installed: {REMEDY}")


def test_older_engine_below_the_family_is_refused(tmp_path: Path) -> None:
    retag(tmp_path, "openinfer-engine", "0.0.9")
    said = said_by(tmp_path, *PLAN)
    assert "requires openinfer-engine" in said
    assert f", and openinfer-engine 0.0.9 is installed: {REMEDY}" in said


def test_core_from_before_contract_numbers_is_refused(tmp_path: Path) -> None:
    copy_core(tmp_path, without="contracts")
    said = said_by(tmp_path, *PLAN)
    assert said.startswith(
        f"openinfer: openinfer {version('openinfer')} needs what openinfer-core {CORE} does not have"
    )
    assert said.endswith(REMEDY)


def test_core_without_a_module_that_the_engine_needs_is_named(tmp_path: Path) -> None:
    copy_core(tmp_path, without="scheduling/waiting_queue.py")
    said = said_by(tmp_path, *PLAN)
    assert f"openinfer-engine {version('openinfer-engine')} uses what openinfer-core {CORE} does not have" in said
    assert "openinfer_core.scheduling.waiting_queue" in said


def test_core_whose_field_has_another_name_is_named(tmp_path: Path) -> None:
    copy_core(tmp_path, renamed={"family.py": ("measured: dict", "measurements: dict")})
    said = said_by(tmp_path, *PLAN)
    assert f"openinfer-engine {version('openinfer-engine')} uses what openinfer-core {CORE} " in said
    assert "TypeError: Unexpected keyword argument 'measured'" in said
    assert said.endswith(REMEDY)


def test_core_whose_field_has_another_name_is_named_by_the_engines_process(tmp_path: Path) -> None:
    copy_core(tmp_path, renamed={"engine.py": ("    memory_bytes: dict", "    ledger_bytes: dict")})
    said = said_by(tmp_path, "generate", "--model", "tiny", "x")
    assert f"openinfer-engine {version('openinfer-engine')} uses what openinfer-core {CORE} " in said
    assert "TypeError: Unexpected keyword argument 'memory_bytes'" in said


def test_llm_says_it_in_one_sentence(tmp_path: Path) -> None:
    copy_core(tmp_path, without="contracts")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-P", "-c", "import openinfer; openinfer.LLM('tiny')"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ImportError: openinfer ")
    assert done.stderr.rstrip().endswith(REMEDY)


@pytest.mark.parametrize(("declared", "remedy"), [("", "upgrade foreign-family"), ("2", "upgrade openinfer-core")])
def test_family_of_another_contract_is_refused_by_name_and_in_no_other_models_way(
    declared: str, remedy: str, tmp_path: Path
) -> None:
    info = tmp_path / "foreign_family-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: foreign-family\nVersion: 1.5\n")
    (info / "entry_points.txt").write_text("[openinfer.models]\nforeign = foreign_family:Family\n")
    says = f"OPENINFER_CONTRACT = {declared}\n" if declared else ""
    (tmp_path / "foreign_family.py").write_text(f"{says}raise RuntimeError('imported')\n")
    said = said_by(tmp_path, *PLAN, "--family", "foreign")
    number = declared or "0"
    assert f"plug-in 'foreign' of foreign-family 1.5 (foreign_family:Family) is written for contract {number}" in said
    assert remedy in said
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-P", "-m", "openinfer.commands.main", *PLAN]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0
    assert f"is written for contract {number} of openinfer.models" in done.stderr
