"""The page `docs/reference/write-a-kv-tier.md` is true: its code runs, conforms, and is the example's."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "openinfer-sqlite-tier"
PAGE = (ROOT / "docs" / "reference" / "write-a-kv-tier.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """What the page's code defines, run from top to bottom."""
    names: dict[str, Any] = {"__name__": "page"}
    for code in blocks("python"):
        exec(compile(code, "write-a-kv-tier.md", "exec"), names)
    return names


def test_page_has_a_store_its_entry_point_and_its_test() -> None:
    assert (len(blocks("python")), len(blocks("toml"))) == (2, 1)


def test_tier_of_the_page_conforms(page: dict[str, Any], tmp_path: Path) -> None:
    page["test_tier_keeps_the_contract"](tmp_path)


def test_store_of_the_page_is_the_examples() -> None:
    source = (EXAMPLE / "src" / "openinfer_sqlite_tier" / "store.py").read_text(encoding="utf-8")
    assert blocks("python")[0] in source


def test_case_of_the_page_is_the_examples() -> None:
    source = (EXAMPLE / "tests" / "test_sqlite_tier.py").read_text(encoding="utf-8")
    case = re.search(r"^class SqliteCase:\n(?:(?: .*)?\n)*", blocks("python")[1], re.MULTILINE)
    assert case is not None
    assert case.group().strip() in source


def test_entry_point_of_the_page_is_the_examples() -> None:
    written = tomllib.loads(blocks("toml")[0])["project"]["entry-points"]
    installed = tomllib.loads((EXAMPLE / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    assert written == installed


def test_files_that_the_page_names_are_there() -> None:
    packages = ROOT / "packages"
    offload = packages / "openinfer-kv-offload/src/openinfer_kv_offload"
    folders = [offload, *packages.glob("openinfer-kv-*/src"), packages / "openinfer-nixl/src"]
    named = re.findall(r"`((?:[a-z_]+/)*[a-z_]+\.py)`", PAGE)
    assert len(named) >= 5
    assert [name for name in named if not any((folder / name).is_file() for folder in folders)] == []
