"""The page `docs/reference/write-an-endpoint.md` is true: its code is the example's, and the example's tests run it."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "packages" / "openinfer-ollama"
PAGE = (ROOT / "docs" / "reference" / "write-an-endpoint.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def test_endpoint_of_the_page_is_the_examples() -> None:
    source = (EXAMPLE / "src" / "openinfer_ollama" / "endpoint.py").read_text(encoding="utf-8")
    assert source.endswith(blocks("python")[0])


def test_entry_point_of_the_page_is_the_examples() -> None:
    written = tomllib.loads(blocks("toml")[0])["project"]["entry-points"]
    installed = tomllib.loads((EXAMPLE / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    assert written == installed


def test_server_of_the_page_is_started_by_the_examples_tests() -> None:
    tests = (EXAMPLE / "tests" / "test_ollama.py").read_text(encoding="utf-8")
    for name in ("ParrotLoop(info)", "ThreadedServer(", 'ServerOptions(port=0, endpoints=("ollama",))'):
        assert name in blocks("python")[1]
        assert name in tests
