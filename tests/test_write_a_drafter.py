"""The page `docs/reference/write-a-drafter.md` is true: its drafter and its entry point are the example's."""

import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "openinfer-lookup"
PAGE = (ROOT / "docs" / "reference" / "write-a-drafter.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def test_drafter_of_the_page_is_the_examples() -> None:
    assert blocks("python")[0] == (EXAMPLE / "src" / "openinfer_lookup" / "__init__.py").read_text(encoding="utf-8")


def test_entry_point_of_the_page_is_the_examples() -> None:
    (written,) = map(tomllib.loads, blocks("toml"))
    installed = tomllib.loads((EXAMPLE / "pyproject.toml").read_text(encoding="utf-8"))
    assert written["project"]["entry-points"] == installed["project"]["entry-points"]


def test_test_of_the_page_passes() -> None:
    drafter, test = blocks("python")
    page: dict[str, Any] = {"__name__": "page"}
    exec(compile(drafter + test, "write-a-drafter.md", "exec"), page)
    page["test_answers_are_those_without_and_drafts_are_accepted"]()
