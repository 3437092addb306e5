"""Every group of entry points in this repository has a contract number, and every plug-in here says it."""

import re
import tomllib
from pathlib import Path

import pytest

from openinfer_core.contracts import CONTRACTS, OUR_PACKAGES, declared_contract, misfit_of

ROOT = Path(__file__).parents[1]
PROJECTS = sorted([*ROOT.glob("packages/*/pyproject.toml"), *ROOT.glob("examples/*/pyproject.toml")])
PAGE = (ROOT / "docs" / "reference" / "public-api.md").read_text(encoding="utf-8")


def entry_points() -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for path in PROJECTS:
        groups = tomllib.loads(path.read_text(encoding="utf-8"))["project"].get("entry-points", {})
        found += [(group, value) for group, names in groups.items() for value in names.values()]
    return sorted({(group, value.partition(":")[0]) for group, value in found})


@pytest.mark.parametrize(("group", "module"), entry_points())
def test_module_of_an_entry_point_says_the_contract_of_its_group(group: str, module: str) -> None:
    assert declared_contract(module) == CONTRACTS[group]


def test_groups_that_the_code_looks_for_have_a_number() -> None:
    sources = [path.read_text(encoding="utf-8") for path in ROOT.glob("packages/*/src/**/*.py")]
    looked_for = {group for text in sources for group in re.findall(r'^[A-Z_]+ = "(openinfer\.[a-z_]+)"$', text, re.M)}
    assert looked_for
    assert looked_for <= CONTRACTS.keys()


def test_our_packages_are_those_of_this_repository() -> None:
    assert {path.parent.name for path in ROOT.glob("packages/*/pyproject.toml")} == OUR_PACKAGES


def test_page_says_the_line_that_a_plugin_needs() -> None:
    assert "```python\nOPENINFER_CONTRACT = 1\n```" in PAGE


@pytest.mark.parametrize("folder", [path.parent for path in PROJECTS if path.parent.parent.name == "packages"])
def test_readme_of_each_package_says_what_is_public(folder: Path) -> None:
    readme = (folder / "README.md").read_text(encoding="utf-8")
    assert readme.count("\n## Promises\n") == 1
    promises = readme.partition("\n## Promises\n")[2].partition("\n## ")[0]
    assert f"{folder.name.replace('-', '_')}.__all__" in promises
    assert "semantic versioning" in promises or folder.name == "openinfer-core"
    assert f"| [{folder.name}](../../packages/{folder.name}/README.md#promises) |" in PAGE


def test_misfit_of_a_wrong_call_names_the_caller_and_the_package_whose_function_it_is() -> None:
    """It takes what an installed package requires to tell whose function a name may be."""
    source = "from openinfer_core import read_config\nread_config()"
    names = {"__name__": "openinfer_kv_cache.part", "__package__": "openinfer_kv_cache"}
    with pytest.raises(TypeError) as caught:
        exec(compile(source, "openinfer_kv_cache.part", "exec"), names)
    sentence = misfit_of(caught.value) or ""
    assert sentence.startswith("openinfer-kv-cache")
    assert "uses what openinfer-core" in sentence
    assert "TypeError: read_config() missing 1 required" in sentence
