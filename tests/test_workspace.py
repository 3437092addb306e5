"""What every package of this repository promises, read from its files: fast, and nothing is installed for it.

The order of `__all__` is ruff's (RUF022); imports between packages are import-linter's; what an install really pulls
in and weighs is `tools/workspace/alone.py`'s.
"""

import importlib
import runpy
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))
EXAMPLES = sorted(path.parent for path in ROOT.glob("examples/*/pyproject.toml"))
NEVER_REQUIRED = {"torch", "transformers", "tensorflow", "jax"}

# DESIGN, section 1: what each package may require of ours. A family (any other name) stands on the engine.
ALLOWED_SIBLINGS = {
    "openinfer": {"openinfer-core", "openinfer-server", "openinfer-tiny-model"},
    "openinfer-bench": {
        "openinfer",
        "openinfer-core",
        "openinfer-engine",
        "openinfer-kernels",
        "openinfer-kv-cache",
        "openinfer-kv-offload",
        "openinfer-ray",
        "openinfer-server",
        "openinfer-tiny-model",
    },
    "openinfer-core": set[str](),
    "openinfer-dynamo": {"openinfer", "openinfer-core"},
    "openinfer-engine": {"openinfer-core", "openinfer-kernels", "openinfer-kv-cache"},
    "openinfer-kernels": set[str](),
    "openinfer-kv-cache": {"openinfer-core"},
    "openinfer-kv-offload": {"openinfer-core", "openinfer-kv-cache"},
    "openinfer-nixl": {"openinfer-core", "openinfer-kv-cache", "openinfer-kv-offload"},
    "openinfer-ollama": {"openinfer-server"},
    "openinfer-ray": {"openinfer", "openinfer-core", "openinfer-engine", "openinfer-kv-cache", "openinfer-server"},
    "openinfer-server": {"openinfer-core"},
    "openinfer-tiny-model": set[str](),
}
FAMILY_SIBLINGS = {"openinfer-core", "openinfer-engine", "openinfer-kernels", "openinfer-kv-cache"}
ALLOWED_SIBLINGS["openinfer-kimi-k2"] = FAMILY_SIBLINGS | {"openinfer-deepseek"}  # the one arrow between families

each_package = pytest.mark.parametrize("folder", PACKAGES, ids=lambda folder: folder.name)
each_distribution = pytest.mark.parametrize("folder", PACKAGES + EXAMPLES, ids=lambda folder: folder.name)


def read(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))


def project(folder: Path) -> dict[str, Any]:
    return read(folder / "pyproject.toml")["project"]


def import_name(folder: Path) -> str:
    return folder.name.replace("-", "_")


def names(requirements: list[Requirement]) -> set[str]:
    return {canonicalize_name(each.name) for each in requirements}


def base_requirements(folder: Path) -> list[Requirement]:
    return [Requirement(line) for line in project(folder).get("dependencies", [])]


def all_requirements(folder: Path) -> list[Requirement]:
    """Return what `pip install` may ever pull in: the dependencies and every extra."""
    extras = project(folder).get("optional-dependencies", {}).values()
    return base_requirements(folder) + [Requirement(line) for extra in extras for line in extra]


def group_requirements(folder: Path) -> list[Requirement]:
    return [Requirement(line) for line in read(folder / "pyproject.toml")["dependency-groups"]["test"]]


def versions_of_ours() -> dict[str, Version]:
    return {folder.name: Version(project(folder)["version"]) for folder in PACKAGES + EXAMPLES}


@each_distribution
def test_folder_holds_the_files_that_a_distribution_needs(folder: Path) -> None:
    assert (folder / "README.md").read_text(encoding="utf-8").startswith("# ")
    assert "## Unreleased" in (folder / "CHANGELOG.md").read_text(encoding="utf-8")
    assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert [path.name for path in (folder / "src").iterdir() if path.is_dir()] == [import_name(folder)]
    assert (folder / "src" / import_name(folder) / "py.typed").is_file()


@each_distribution
def test_metadata_is_static_and_uniform(folder: Path) -> None:
    table = project(folder)
    assert table["name"] == folder.name
    assert "dynamic" not in table
    assert len(Version(table["version"]).release) == 3
    assert table["requires-python"] == ">=3.11"
    assert table["license"] == "Apache-2.0"
    assert table["license-files"] == ["LICENSE"]
    assert table["readme"] == "README.md"


@each_distribution
def test_metadata_that_all_share_is_what_one_table_says(folder: Path) -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "workspace" / "metadata.py"))
    text = (folder / "pyproject.toml").read_text(encoding="utf-8")
    assert tool["written"](text, folder) == text, "run ./run metadata"


@each_distribution
def test_siblings_are_required_within_their_minor_version(folder: Path) -> None:
    versions = versions_of_ours()
    for requirement in all_requirements(folder) + group_requirements(folder):
        if requirement.name in versions and requirement.name != folder.name:
            current = versions[requirement.name]
            expected = Requirement(f"x>={current.major}.{current.minor},<{current.major}.{current.minor + 1}")
            assert requirement.specifier == expected.specifier, str(requirement)


@each_distribution
def test_third_parties_are_required_with_a_lower_bound(folder: Path) -> None:
    for requirement in all_requirements(folder) + group_requirements(folder):
        operators = {specifier.operator for specifier in requirement.specifier}
        assert operators & {">=", "==", "~="} or requirement.name == folder.name, f"{requirement} has no lower bound"


@each_package
def test_base_install_pulls_in_no_package_from_beside_or_above(folder: Path) -> None:
    ours = names(base_requirements(folder)) & versions_of_ours().keys()
    assert ours <= ALLOWED_SIBLINGS.get(folder.name, FAMILY_SIBLINGS)


@each_distribution
def test_no_other_framework_is_required(folder: Path) -> None:
    assert not names(all_requirements(folder)) & NEVER_REQUIRED


@each_distribution
def test_every_public_name_exists_once_and_is_not_private(folder: Path) -> None:
    module = importlib.import_module(import_name(folder))
    public = module.__all__
    assert len(set(public)) == len(public)
    assert [name for name in public if not hasattr(module, name)] == []
    assert [name for name in public if name.startswith("_") and name != "__version__"] == []


@each_distribution
def test_tests_can_run_beside_those_of_the_other_packages(folder: Path) -> None:
    assert any((folder / "tests").rglob("test_*.py"))
    assert not list((folder / "tests").rglob("__init__.py"))


@each_distribution
def test_the_test_environment_has_what_the_tests_of_each_package_need(folder: Path) -> None:
    environment = [Requirement(line) for line in read(ROOT / "hatch.toml")["envs"]["test"]["dependencies"]]
    editable = versions_of_ours().keys()
    brought_along = names([each for other in PACKAGES for each in base_requirements(other)])
    needed = names(group_requirements(folder))
    assert "pytest" in needed
    assert needed - editable - brought_along <= names(environment)


def test_import_linter_watches_every_package() -> None:
    configuration = read(ROOT / "pyproject.toml")["tool"]["importlinter"]
    assert configuration["root_packages"] == [import_name(folder) for folder in PACKAGES]
    everywhere = next(each for each in configuration["contracts"] if "pickle" in each.get("forbidden_modules", ()))
    assert everywhere["source_modules"] == configuration["root_packages"]


def test_root_project_file_holds_only_tools() -> None:
    assert read(ROOT / "pyproject.toml").keys() == {"tool"}


def test_architecture_page_can_be_read_in_one_sitting() -> None:
    assert len((ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").splitlines()) <= 150
