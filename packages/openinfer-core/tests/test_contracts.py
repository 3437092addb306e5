"""Contract numbers are read without importing, and what does not fit is one sentence that says what to upgrade."""

import gc
import sys
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import EntryPoint, version
from pathlib import Path

import pytest

from openinfer_core import BrokenPlugin, ContractMismatch, Plugin, find_plugin, list_plugins
from openinfer_core.contracts import CONTRACTS, OUR_PACKAGES, declared_contract, misfit_of, require_contract

GROUP = "openinfer.schedulers"
EXPLODES = "raise RuntimeError('imported')\n"
CORE = f"openinfer-core {version('openinfer-core')}"

WritePackage = Callable[[dict[str, str]], None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WritePackage:
    """Writes modules on the import path, none of which may be imported: each raises if it is."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(sources: dict[str, str]) -> None:
        for name, source in sources.items():
            path = tmp_path / f"{name}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source + EXPLODES)

    return write


def plugin_of(value: str, group: str = GROUP) -> Plugin:
    return find_plugin(group, "x", lister=lambda group: [EntryPoint("x", value, group)])


@pytest.mark.parametrize(
    ("source", "number"),
    [
        ("OPENINFER_CONTRACT = 1\n", 1),
        ("OPENINFER_CONTRACT: int = 2\n", 2),
        ("import sys\n\nOTHER = OPENINFER_CONTRACT = 3\n", 3),
        ("", 0),
        ("def f():\n    OPENINFER_CONTRACT = 1\n", 0),
        ('"""OPENINFER_CONTRACT = 1"""\n', 0),
    ],
)
def test_declared_contract_is_what_the_source_assigns(source: str, number: int, write: WritePackage) -> None:
    write({"contracts_plain": source})
    assert declared_contract("contracts_plain") == number


@pytest.mark.parametrize(
    "source",
    [
        "OPENINFER_CONTRACT = int('1')\n",
        "OPENINFER_CONTRACT = True\n",
        "OPENINFER_CONTRACT = '1'\n",
        "OPENINFER_CONTRACT = -1\n",
        "from somewhere import OPENINFER_CONTRACT\n",
        "OPENINFER_CONTRACT = 1\nOPENINFER_CONTRACT = 2\n",
    ],
)
def test_declared_contract_that_is_no_plain_number_is_an_error(source: str, write: WritePackage) -> None:
    write({"contracts_odd": source})
    with pytest.raises(ValueError, match="must say OPENINFER_CONTRACT once, as a plain number"):
        declared_contract("contracts_odd")


def test_declared_contract_of_a_submodule_imports_no_package_around_it(write: WritePackage) -> None:
    write({"contracts_outer/__init__": "", "contracts_outer/inner/__init__": "", "contracts_outer/inner/leaf": ""})
    write({"contracts_outer/inner/told": "OPENINFER_CONTRACT = 4\n"})
    assert declared_contract("contracts_outer.inner.told") == 4
    assert declared_contract("contracts_outer.inner.leaf") == 0
    assert declared_contract("contracts_outer.inner") == 0
    assert not any(name.startswith("contracts_outer") for name in sys.modules)


def test_declared_contract_of_a_package_is_in_its_init(write: WritePackage) -> None:
    write({"contracts_package/__init__": "OPENINFER_CONTRACT = 5\nfrom .part import X\n", "contracts_package/part": ""})
    assert declared_contract("contracts_package") == 5


def test_declared_contract_inside_nested_namespace_packages(write: WritePackage) -> None:
    write({"contracts_company/team/part": "OPENINFER_CONTRACT = 6\n"})
    assert declared_contract("contracts_company.team.part") == 6


def test_declared_contract_in_an_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tmp_path / "plugins.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("contracts_zipped/__init__.py", EXPLODES)
        file.writestr("contracts_zipped/part.py", "OPENINFER_CONTRACT = 7\n" + EXPLODES)
    monkeypatch.syspath_prepend(archive)
    assert declared_contract("contracts_zipped.part") == 7


def test_declared_contract_through_the_finder_of_an_editable_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As setuptools makes one: the package is on no path, and a finder knows where it is."""
    from importlib.machinery import ModuleSpec
    from importlib.util import spec_from_file_location

    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "__init__.py").write_text(EXPLODES)
    (tmp_path / "elsewhere" / "part.py").write_text("OPENINFER_CONTRACT = 8\n" + EXPLODES)

    class Finder:
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
            if name != "contracts_editable":
                return None
            return spec_from_file_location(name, tmp_path / "elsewhere" / "__init__.py")

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    assert declared_contract("contracts_editable.part") == 8


@pytest.mark.parametrize("module", ["contracts_nowhere", "contracts_outer.nowhere", "contracts_plain.part"])
def test_declared_contract_of_no_module_is_an_import_error(module: str, write: WritePackage) -> None:
    write({"contracts_outer/__init__": "", "contracts_plain": ""})
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'contracts_\w+(\.\w+)?'"):
        declared_contract(module)


def test_declared_contract_without_a_source_says_so(write: WritePackage) -> None:
    write({"contracts_company/team/part": ""})
    for module in ("sys", "contracts_company.team"):
        with pytest.raises(ValueError, match=rf"{module} .* has no Python source"):
            declared_contract(module)


# what is said of a plug-in


def test_plugin_of_an_older_contract_is_told_to_upgrade_before_it_is_imported(write: WritePackage) -> None:
    write({"contracts_old": ""})
    with pytest.raises(ContractMismatch) as caught:
        plugin_of("contracts_old:Thing").load()
    assert str(caught.value) == (
        "openinfer.schedulers plug-in 'x' of contracts_old:Thing (contracts_old:Thing) is written for contract 0 of "
        f"openinfer.schedulers (its module says no OPENINFER_CONTRACT), and {CORE} has contract 1: "
        "upgrade the package of contracts_old to a release for contract 1"
    )


def test_plugin_of_a_newer_contract_says_to_upgrade_core(write: WritePackage) -> None:
    write({"contracts_new": "OPENINFER_CONTRACT = 2\n"})
    with pytest.raises(ContractMismatch) as caught:
        plugin_of("contracts_new:Thing").load()
    assert "is written for contract 2 of openinfer.schedulers, and" in str(caught.value)
    assert str(caught.value).endswith("has contract 1: upgrade openinfer-core to a release for contract 2")


def test_plugin_of_a_distribution_is_named_by_it(tmp_path: Path, write: WritePackage) -> None:
    write({"contracts_named": "OPENINFER_CONTRACT = 2\n"})
    info = tmp_path / "contracts_named-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: contracts-named\nVersion: 1.5\n")
    (info / "entry_points.txt").write_text("[openinfer.schedulers]\nnamed = contracts_named:Thing\n")
    with pytest.raises(ContractMismatch, match=r"^openinfer.schedulers plug-in 'named' of contracts-named 1.5 "):
        find_plugin(GROUP, "named").load()
    with pytest.raises(ContractMismatch, match=r"has contract 3: upgrade contracts-named to a release for contract 3$"):
        require_contract(find_plugin(GROUP, "named"), contracts={GROUP: 3})


def test_plugin_of_another_projects_group_has_no_number(write: WritePackage) -> None:
    write({"contracts_plain": ""})
    require_contract(plugin_of("contracts_plain:Thing", group="someone.elses"))


def test_plugin_whose_module_is_not_there_or_is_no_python_is_broken(write: WritePackage) -> None:
    with pytest.raises(BrokenPlugin, match="cannot be read: ModuleNotFoundError: No module named 'contracts_gone'"):
        plugin_of("contracts_gone:X").load()
    write({"contracts_no_python": "def (\n"})
    with pytest.raises(BrokenPlugin, match="cannot be read: SyntaxError"):
        plugin_of("contracts_no_python:X").load()


def test_installed_plugins_of_ours_are_written_for_these_contracts() -> None:
    ours = [plugin for group in CONTRACTS for plugin in list_plugins(group) if plugin.origin.startswith("openinfer")]
    assert ours
    for plugin in ours:
        require_contract(plugin)


# packages of ours that do not fit each other


def error_of(source: str, module: str) -> Exception:
    """What running a source raises, as if it were a module of that name."""
    names = {"__name__": module, "__package__": module.partition(".")[0]}
    with pytest.raises(Exception) as caught:  # noqa: PT011 - whatever it raises
        exec(compile(source, module, "exec"), names)
    return caught.value


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("import openinfer_core.nothing", "ModuleNotFoundError: No module named 'openinfer_core.nothing'"),
        ("from openinfer_core import Nothing", "ImportError: cannot import name 'Nothing' from 'openinfer_core'"),
        ("import openinfer_core\nopeninfer_core.nothing", "AttributeError: module 'openinfer_core' has no attribute"),
        (
            "from openinfer_core import SamplingParams\nSamplingParams(max_tokens=1).nothing",
            "AttributeError: 'SamplingParams' object has no attribute 'nothing'",
        ),
    ],
)
def test_misfit_names_both_packages_and_what_is_lacking(source: str, says: str) -> None:
    sentence = misfit_of(error_of(source, "openinfer_kv_cache.part")) or ""
    assert sentence.startswith("openinfer-kv-cache")
    assert f"uses what {CORE} does not have ({says}" in sentence
    assert sentence.endswith("install all packages of openinfer from one release")


@pytest.mark.parametrize(
    "source",
    [
        "import nothing_of_ours",
        "import openinfer_kv_cache_of_someone",
        "len()",
        "None.x",
        "def f(): pass\nf(1)",
        "raise TypeError('no call')",
    ],
)
def test_misfit_is_none_for_errors_of_anything_else(source: str) -> None:
    assert misfit_of(error_of(source, "openinfer_kv_cache.part")) is None


@pytest.mark.parametrize("module", ["openinfer_core.part", "someone.part"])
def test_misfit_is_none_inside_one_package_and_for_other_projects(module: str) -> None:
    assert misfit_of(error_of("import openinfer_core.nothing", module)) is None


def test_names_of_our_packages_are_those_of_their_modules() -> None:
    assert "openinfer-core" in OUR_PACKAGES
    assert all(name == "openinfer" or name.startswith("openinfer-") for name in OUR_PACKAGES)


def test_threads_that_read_sources_at_once_do_not_disturb_each_other() -> None:
    """Without a lock it fails on CPython 3.11 at nearly each run; collections are where threads give way to others."""
    interval, thresholds = sys.getswitchinterval(), gc.get_threshold()
    module = "openinfer_core.scheduling.draft_counter"

    def give_way(phase: str, info: object) -> None:
        sum(range(50))

    gc.callbacks.append(give_way)
    sys.setswitchinterval(1e-6)
    gc.set_threshold(20)
    try:
        with ThreadPoolExecutor(3) as threads:
            numbers = list(threads.map(lambda _: declared_contract(module), range(30)))
    finally:
        gc.set_threshold(*thresholds)
        sys.setswitchinterval(interval)
        gc.callbacks.remove(give_way)
    assert numbers == [0] * 30
