"""The page `docs/reference/write-a-tool-parser.md` is true: its code runs, conforms, and is the example's."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from openinfer_core.plugins import list_plugins
from openinfer_server.parsers import CallableFunction, LarkTexts
from openinfer_server.parsers.choose import REASONING_PARSERS, TOOL_PARSERS

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "openinfer-mistral-calls"
PAGE = (ROOT / "docs" / "reference" / "write-a-tool-parser.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """What the page's code defines, run from top to bottom."""
    names: dict[str, Any] = {"__name__": "page"}
    for code in blocks("python"):
        exec(compile(code, "write-a-tool-parser.md", "exec"), names)
    return names


def test_page_has_two_parsers_and_their_tests() -> None:
    assert len(blocks("python")) == 5
    assert len(blocks("toml")) == 2


def test_parsers_of_the_page_conform(page: dict[str, Any]) -> None:
    page["test_parser_conforms"]()
    page["test_reasoning_parser_conforms"]()


def test_call_syntax_of_the_page_is_what_its_parser_reads(page: dict[str, Any]) -> None:
    function = CallableFunction("now", {}, strict=False)
    syntax = page["ConstrainedMistralParser"].call_syntax([function], LarkTexts(lambda _: None, ()))
    assert syntax.triggers == ("[TOOL_CALLS]",)
    assert syntax.calls[0].startswith('"[TOOL_CALLS]now[ARGS]" %json {')


def test_parser_of_the_page_is_the_examples() -> None:
    source = (EXAMPLE / "src" / "openinfer_mistral_calls" / "parser.py").read_text(encoding="utf-8")
    _, _, written = blocks("python")[0].partition("import re\n")
    assert written in source


def test_entry_point_of_the_page_is_the_examples() -> None:
    written = tomllib.loads(blocks("toml")[0])["project"]["entry-points"]
    installed = tomllib.loads((EXAMPLE / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    assert written == installed


@pytest.mark.parametrize("group", [TOOL_PARSERS, REASONING_PARSERS])
def test_page_names_every_parser_that_comes_with_the_server(group: str) -> None:
    ours = [plugin for plugin in list_plugins(group) if plugin.entry_point.value.startswith("openinfer_server.")]
    assert len(ours) > 2
    for plugin in ours:
        assert re.search(rf"`[^`]*{plugin.name}`", PAGE), plugin.name
