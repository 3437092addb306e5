"""The routes on a server whose engine says its prompt back."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from openinfer_core.engine import EngineInfo
from openinfer_server import ServerOptions
from openinfer_server.testing import ParrotLoop, ThreadedServer
from openinfer_tiny_model import model_dir


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    info = EngineInfo(
        model="parrot",
        family="birds",
        max_model_tokens=256,
        num_token_ids=2040,
        eos_token_ids=(1,),
        block_size_tokens=16,
        num_blocks=64,
        max_num_seqs=8,
        max_waiting=8,
    )
    options = ServerOptions(port=0, endpoints=("ollama",))
    with ThreadedServer(ParrotLoop(info), model_dir(), options) as server:
        yield server.url


def ask(url: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data=data, headers={"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=20) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_generate_continues_the_prompt(url: str) -> None:
    body = {"model": "parrot", "prompt": "The capital of France is Paris.", "stream": False}
    status, answer = ask(url, "/api/generate", {**body, "options": {"num_predict": 40, "stop": ["Paris"]}})
    assert status == 200
    assert (answer["response"], answer["done"], answer["done_reason"]) == ("The capital of France is ", True, "stop")
    _, answer = ask(url, "/api/generate", {**body, "options": {"num_predict": 2}})
    assert (answer["eval_count"], answer["done_reason"]) == (2, "length")


def test_tags_lists_the_models(url: str) -> None:
    assert ask(url, "/api/tags") == (200, {"models": [{"name": "parrot"}]})


@pytest.mark.parametrize(
    ("fields", "status", "word"),
    [
        ({}, 400, "stream"),
        ({"stream": False, "options": {"mirostat": 1}}, 400, "options.mirostat"),
        ({"stream": False, "options": {"temperature": -1}}, 400, "temperature"),
        ({"stream": False, "model": "eagle"}, 404, "eagle"),
        ({"stream": False, "prompt": "stone " * 3000}, 400, "context"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(url: str, fields: dict[str, Any], status: int, word: str) -> None:
    got, answer = ask(url, "/api/generate", {"model": "parrot", "prompt": "a", **fields})
    assert got == status
    assert word in answer["error"]["message"]


def test_routes_are_in_the_document(url: str) -> None:
    _, document = ask(url, "/openapi.json")
    assert {"/api/generate", "/api/tags"} <= set(document["paths"])
