"""The page `docs/reference/write-an-endpoint.md` is true: its endpoint is installed as a package, and its test runs."""

import importlib
import json
import re
import tomllib
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import openinfer_server
from openinfer_core.engine import EngineInfo
from openinfer_server import ServerOptions
from openinfer_server.testing import ParrotLoop, ThreadedServer
from openinfer_tiny_model import model_dir

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "reference" / "write-an-endpoint.md").read_text(encoding="utf-8")
OLLAMA = sorted((ROOT / "packages" / "openinfer-ollama" / "src").rglob("*.py"))
INFO = EngineInfo(
    model="parrot",
    family="birds",
    max_model_tokens=256,
    num_token_ids=2040,
    eos_token_ids=(0,),
    block_size_tokens=16,
    num_blocks=64,
    max_num_seqs=8,
    max_waiting=8,
)


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def post(url: str, body: dict[str, Any]) -> str:
    """The body of a response, whatever its status."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=20) as response:
            return response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.read().decode()


@pytest.fixture
def questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The page's package, installed."""
    (tmp_path / "my_questions.py").write_text(blocks("python")[0])
    ((group, points),) = tomllib.loads(blocks("toml")[0])["project"]["entry-points"].items()
    folder = tmp_path / "my_questions-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: my-questions\nVersion: 1.0\n")
    lines = [f"{name} = {value}" for name, value in points.items()]
    (folder / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
    monkeypatch.syspath_prepend(tmp_path)
    return importlib.import_module("my_questions")


@pytest.fixture
def server(questions: ModuleType) -> Iterator[ThreadedServer]:
    del questions
    options = ServerOptions(port=0, endpoints=("questions",))
    with ThreadedServer(ParrotLoop(INFO), model_dir(), options) as server:
        yield server


def test_test_of_the_page_passes(questions: ModuleType) -> None:
    names: dict[str, Any] = {"msgspec": questions.msgspec}
    exec(compile(blocks("python")[1], "write-an-endpoint.md", "exec"), names)
    check: Callable[..., None] = names["test_questions"]
    check(INFO, model_dir(), post)


def test_errors_have_the_pages_form_and_names(server: ThreadedServer) -> None:
    for body, word in (
        ({"question": "?", "font": "bold"}, "font is not supported"),
        ({"question": "?", "creativity": -1}, "creativity"),
        ({"question": "?", "words": 0}, "words is 0"),
        ({"question": "stone " * 300}, "context"),
    ):
        told = json.loads(post(server.url + "/ask", body))
        assert told.keys() == {"kind", "what"}
        assert word in told["what"]


def test_whole_answer_is_the_streamed_one(server: ThreadedServer) -> None:
    streamed, whole = (
        post(server.url + "/ask", {"question": "Where?", "words": 9, "whole": each}) for each in (False, True)
    )
    assert streamed == whole


def test_an_endpoint_needs_no_more_than_the_public_names() -> None:
    """Ollama's API is written against them alone."""
    assert OLLAMA
    for path in OLLAMA:
        source = path.read_text(encoding="utf-8")
        assert set(re.findall(r"^(?:from|import) (openinfer_(?!ollama)[\w.]+)", source, re.M)) <= {
            "openinfer_server",
            "openinfer_server.parsers",
        }
        for names in re.findall(r"^from openinfer_server import (\([^)]*\)|.*)", source, re.MULTILINE):
            assert {*re.findall(r"\w+", names)} <= {*openinfer_server.__all__}
