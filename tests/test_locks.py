"""The locks have a place for everything that is installed here, with the hashes of its files and no index's name."""

import re
import runpy
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
LOCKS = ROOT / "tools" / "workspace" / "locks"
TOOL = runpy.run_path(str(ROOT / "tools" / "workspace" / "lock.py"))
ENTRY = re.compile(r"^([\w.-]+)==(\S+)(?: ; [^\\\n]*)?((?: ?\\\n    --hash=sha256:[0-9a-f]{64})+)$", re.MULTILINE)


def entries(lock: str) -> dict[str, list[Version]]:
    found: dict[str, list[Version]] = {}
    for name, version, _ in ENTRY.findall((LOCKS / f"{lock}.txt").read_text("utf-8")):
        found.setdefault(canonicalize_name(name), []).append(Version(version))
    return found


@pytest.mark.parametrize("lock", ["workspace", "cuda12", "uv"])
def test_each_entry_has_hashes_and_none_names_an_index(lock: str) -> None:
    text = (LOCKS / f"{lock}.txt").read_text("utf-8")
    assert ENTRY.search(text)
    assert ENTRY.sub("", text).split("\n", 1)[1].strip() == ""
    assert "://" not in text


@pytest.mark.parametrize("lock", ["workspace", "cuda12"])
def test_each_requirement_has_a_version_that_fits(lock: str) -> None:
    pinned = entries(lock)
    lines = TOOL["of_packages"](lock, tests=lock == "workspace")
    lines += [*TOOL["of_environments"](), *TOOL["BOOTSTRAP"]] if lock == "workspace" else []
    missing = [
        line
        for line, each in ((line, Requirement(line)) for line in lines)
        if not any(version in each.specifier for version in pinned.get(canonicalize_name(each.name), []))
    ]
    assert missing == [], "run ./run lock"


def test_what_run_installs_before_anything_else_is_what_the_lock_was_made_for() -> None:
    script = (ROOT / "run").read_text("utf-8")
    for requirement in TOOL["BOOTSTRAP"]:
        assert f'"{requirement}"' in script
    assert entries("uv")["uv"] == entries("workspace")["uv"]
