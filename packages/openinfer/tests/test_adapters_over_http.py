"""Adapters over HTTP, of real servers: whichever process answers, and whatever is loaded."""

import json
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from served_tiny import USER, Served, serving, wait_until

from openinfer.models import find_model_dir
from openinfer_core import claim, list_plugins, read_config
from openinfer_core.plugins import MODELS
from openinfer_engine.testing.adapters import write_adapter

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="API workers share a port on Linux")

LARGE = 40_000
RANK = 4
POOL = ("--num-blocks", "256", "--max-num-seqs", "8", "--max-model-tokens", "256")
PROMPT = "The capital of France"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the adapters `a` and `b` of the tiny model, whose effect is large."""
    folder = tmp_path_factory.mktemp("adapters")
    config = read_config(find_model_dir("tiny"))
    family: Any = claim(config, list_plugins(MODELS))[0]
    for seed, name in enumerate("ab"):
        write_adapter(folder / name, family.definition, config, rank=RANK, seed=seed, size=2.0)
    return folder


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Iterator[Served]:
    """Four API workers, and one for large requests, which the first of them starts."""
    folder = tmp_path_factory.mktemp("adapted")
    with serving(folder, *POOL, "--workers", "4", "--lora-root", str(root), "--max-loras", "2") as it:
        wait_until(lambda: large(it, "tiny")[1] == "close", "a process for large requests")
        yield it


def load(served: Served, name: str, path: str, **fields: object) -> tuple[int, Any]:
    return served.ask("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": path, **fields})


def unload(served: Served, name: str) -> tuple[int, Any]:
    return served.ask("POST", "/v1/unload_lora_adapter", {"lora_name": name})


def ask(served: Served, model: str, *, padding: int = 0) -> tuple[int, dict[str, str], Any]:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True}
    return served.ask_whole("POST", "/v1/completions", body, key=USER, padding=padding)


def large(served: Served, model: str) -> tuple[int, str, Any]:
    """Status, `close` where the process for large requests has answered, and what was said."""
    status, headers, answer = ask(served, model, padding=LARGE)
    return status, headers.get("connection", ""), answer


def distance(one: Any, other: Any) -> float:
    """Mean difference of log-probabilities over the prompt's tokens."""
    of_each = (each["choices"][0]["logprobs"]["token_logprobs"][1:-1] for each in (one, other))
    return fmean(abs(mine - theirs) for mine, theirs in zip(*of_each, strict=True))


def test_every_process_serves_what_a_call_has_loaded_and_not_what_it_has_unloaded(served: Served) -> None:
    """Each question comes over a connection of its own: any of four workers may have it."""
    plain = ask(served, "tiny")[2]
    of_content: dict[str, Any] = {}
    for turn in range(6):
        content = "ab"[turn % 2]
        assert load(served, "tuned", content)[0] == 200
        said = [ask(served, "tuned") for _ in range(6)]
        assert {status for status, _, _ in said} == {200}
        status, connection, answer = large(served, "tuned")
        assert (status, connection) == (200, "close")
        first = of_content.setdefault(content, answer)
        for each in (answer, *(each[2] for each in said)):
            assert distance(each, first) < 1e-3, "a process has another adapter under this name"
        assert distance(answer, plain) > 0.05, "the adapter has no effect"
        assert all("tuned" in str(served.ask("GET", "/v1/models", key=USER)[1]) for _ in range(4))
        assert unload(served, "tuned")[0] == 200
        assert {ask(served, "tuned")[0] for _ in range(6)} == {404}
        assert large(served, "tuned")[:2] == (404, "close")
    assert distance(of_content["a"], of_content["b"]) > 0.05, "two contents under one name cannot be told apart"


def test_names_of_the_served_model_and_of_loaded_adapters_are_refused(served: Served) -> None:
    assert load(served, "tiny", "a")[0] == 400
    assert load(served, "mine", "a")[0] == 200
    assert load(served, "mine", "b")[0] == 400
    assert load(served, "mine", "b", load_inplace=True)[0] == 200
    assert unload(served, "mine")[0] == 200


def test_adapter_of_a_tenant_is_not_there_for_others_in_any_process(served: Served) -> None:
    assert load(served, "theirs", "a", tenants=["o"])[0] == 200
    for _ in range(5):
        assert ask(served, "theirs")[0] == 404
        assert "theirs" not in str(served.ask("GET", "/v1/models", key=USER)[1])
    assert large(served, "theirs")[:2] == (404, "close")
    assert "theirs" in str(served.ask("GET", "/v1/models")[1])
    assert unload(served, "theirs")[0] == 200


def _nan(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-2] + b"\xc0\x7f")  # the last number, in BF16


def _huge_rank(folder: Path) -> None:
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "r": 2**40}))


def _raw(header: bytes, data: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def _twice(folder: Path) -> None:
    entry = b'"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}'
    (folder / "adapter_model.safetensors").write_bytes(_raw(b"{" + entry + b", " + entry + b"}", bytes(4)))


def _million(folder: Path) -> None:
    entries = (f'"t{each}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' for each in range(10**6))
    (folder / "adapter_model.safetensors").write_bytes(_raw(("{" + ",".join(entries) + "}").encode()))


def _header_beyond_the_file(folder: Path) -> None:
    (folder / "adapter_model.safetensors").write_bytes((2**62).to_bytes(8, "little") + b"{}")


def _fifo(folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()
    os.mkfifo(folder / "adapter_model.safetensors")


def _link_out(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    target = folder.parent.parent / "outside.safetensors"
    shutil.copyfile(file, target)
    file.unlink()
    file.symlink_to(target)


@pytest.mark.parametrize(
    "spoil",
    [_nan, _huge_rank, _twice, _million, _header_beyond_the_file, _fifo, _link_out],
    ids=lambda each: each.__name__,
)
def test_hostile_folders_are_400_and_the_server_goes_on(
    served: Served, root: Path, spoil: Callable[[Path], None]
) -> None:
    folder = root / f"hostile{spoil.__name__}"
    shutil.copytree(root / "a", folder)
    spoil(folder)
    try:
        status, answer = load(served, "hostile", folder.name)
    finally:
        shutil.rmtree(folder)
    assert (status, answer["error"]["code"]) == (400, "lora_not_loaded"), answer
    assert "Traceback" not in answer["error"]["message"]
    assert ask(served, "hostile")[0] == 404
    assert ask(served, "tiny")[0] == 200


@pytest.mark.parametrize("path", ["../../etc", "/etc", "a/../../..", "", "\0", "a" * 5000])
def test_paths_out_of_the_root_are_400(served: Served, path: str) -> None:
    assert load(served, "away", path)[0] == 400


def test_loads_and_unloads_under_traffic_of_all_workers_lose_no_request(served: Served) -> None:
    is_over = threading.Event()
    statuses: list[int] = []

    def client(number: int) -> None:
        while not is_over.is_set():
            statuses.append(ask(served, f"turn-{number % 3}", padding=LARGE * (number == 0))[0])

    clients = [threading.Thread(target=client, args=(number,)) for number in range(4)]
    for each in clients:
        each.start()
    for turn in range(30):
        name = f"turn-{turn % 3}"
        assert load(served, name, "ab"[turn % 2])[0] == 200
        if turn >= 2:
            assert unload(served, f"turn-{(turn - 2) % 3}")[0] == 200
    is_over.set()
    for each in clients:
        each.join()
    assert set(statuses) <= {200, 404}
    assert 200 in statuses
    for turn in (28, 29):
        assert unload(served, f"turn-{turn % 3}")[0] == 200
    assert "turn-" not in str(served.ask("GET", "/v1/models")[1])
