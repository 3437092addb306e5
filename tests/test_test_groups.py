"""A package's tests use only packages of ours that it requires or that its `test` group names.

`./run test` has all packages in one environment, so a test that needs another one passes there and fails where
`./run alone` installs the package by itself.
"""

import ast
import re
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
FOLDERS = {
    path.parent.name: path.parent for kind in ("packages", "examples") for path in ROOT.glob(f"{kind}/*/pyproject.toml")
}
PROJECTS: dict[str, dict[str, Any]] = {
    name: tomllib.loads((folder / "pyproject.toml").read_text("utf-8")) for name, folder in FOLDERS.items()
}
PLUG_INS = ("models", "drafters", "kv_tiers", "rank_hosts", "schedulers", "queue_policies", "kernel_providers")
NEEDS_NONE = {
    ("openinfer-core", "token-budget"): "the name of a scheduler in numbers that are added up",
    ("openinfer-deepseek", "deepseek_v4"): "refused by name",
    ("openinfer-deepseek", "kimi_k2"): "refused by name",
    ("openinfer-deepseek-v4", "deepseek_v2"): "refused by name",
    ("openinfer-deepseek-v4", "deepseek_v3"): "refused by name",
    ("openinfer-dynamo", "openinfer_kv_offload"): "next to Dynamo alone, in an environment that has every package",
    ("openinfer-server", "deepseek_v4"): "a model's traits, by which parsers are chosen",
}
"""What tests of a package name and do without."""


def installed(name: str) -> set[str]:
    """Packages of ours where this one is installed with its `test` group, extras followed."""
    found: set[tuple[str, str]] = set()
    wanted = {(name, ""), *_named(PROJECTS[name]["dependency-groups"]["test"])}
    while wanted:
        package, extra = each = wanted.pop()
        found.add(each)
        project = PROJECTS[package]["project"]
        lines = project.get("optional-dependencies", {})[extra] if extra else project.get("dependencies", [])
        wanted |= _named(lines) - found
    return {package for package, _ in found}


def _named(lines: list[str]) -> set[tuple[str, str]]:
    ours = [each for each in map(Requirement, lines) if each.name in PROJECTS]
    return {(each.name, extra) for each in ours for extra in ("", *each.extras)}


MODULES = {name.replace("-", "_"): name for name in PROJECTS}
NAMES = {
    plug_in: name
    for name, settings in PROJECTS.items()
    for kind in PLUG_INS
    for plug_in in settings["project"].get("entry-points", {}).get(f"openinfer.{kind}", {})
    if "-" in plug_in or "_" in plug_in
}
"""Plug-ins with the package that has them: names of two words, which as a text of a test mean nothing else."""


def used(source: str) -> Iterator[tuple[int, str, str]]:
    """Lines with what they import or name of a package of ours, and with that package."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in NAMES:
            yield node.lineno, node.value, NAMES[node.value]
        for module in _imported(node):
            if module in MODULES:
                yield node.lineno, module, MODULES[module]


def _imported(node: Any) -> list[str]:
    paths = [each.name for each in node.names] if isinstance(node, ast.Import) else []
    paths += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
    return [path.partition(".")[0] for path in paths]


def lacking(name: str, sources: Iterable[Path | str]) -> Iterator[tuple[str, str]]:
    """What these tests of a package use and do not get, with a place that says so."""
    there = installed(name)
    not_there = {what for what, package in (MODULES | NAMES).items() if package not in there}
    for source in sources:
        text = source if isinstance(source, str) else source.read_text("utf-8")
        if not_there.isdisjoint(re.findall(r"[\w-]+", text)):
            continue  # to parse all of them takes seconds
        for line, what, package in used(text):
            if package not in there:
                yield what, f"{source if isinstance(source, Path) else 'line'}:{line}: {what} is {package}'s"


def sources_of(name: str) -> list[Path]:
    return sorted((FOLDERS[name] / "tests").rglob("*.py"))


@pytest.mark.parametrize("name", sorted(FOLDERS))
def test_tests_use_no_package_that_their_group_does_not_install(name: str) -> None:
    """Add it to the `test` group, or say in `NEEDS_NONE` why the tests do without."""
    assert [place for what, place in lacking(name, sources_of(name)) if (name, what) not in NEEDS_NONE] == []


def test_what_needs_no_package_is_still_named() -> None:
    for name in {name for name, _ in NEEDS_NONE}:
        assert {what for what, _ in lacking(name, sources_of(name))} == {
            what for each, what in NEEDS_NONE if each == name
        }


def test_imports_and_plug_ins_of_others_are_found() -> None:
    source = (
        'import openinfer_ray.ranks\nfrom openinfer_nixl import x\nrun("deepseek-v4-mtp", "mtp", "openinfer_core")\n'
    )
    found = {what for what, _ in lacking("openinfer-kv-cache", [source])}
    assert found == {"openinfer_ray", "openinfer_nixl", "deepseek-v4-mtp"}
    assert list(lacking("openinfer-engine", ['run("deepseek-v4-mtp", "deepseek_v4")'])) == []  # of its test group
