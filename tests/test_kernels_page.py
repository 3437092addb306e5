"""docs/reference/kernels.md says what the catalogue says."""

import importlib.util
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "tools/workspace/kernels_page.py"


def test_the_tables_are_those_of_the_catalogue() -> None:
    spec = importlib.util.spec_from_file_location("kernels_page", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    page = script.PAGE.read_text(encoding="utf-8")
    assert script.BEGIN in page
    assert script.with_tables(page) == page, "run tools/workspace/kernels_page.py"
