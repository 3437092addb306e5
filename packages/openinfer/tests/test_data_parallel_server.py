"""Data-parallel ranks that are processes, behind `openinfer serve`: what clients get, also when one rank dies."""

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import httpx
import pytest

from openinfer_bench.served import Served, served
from openinfer_core import find_plugin

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the rank's process is found in /proc")
FIXTURE = Path(__file__).parent / "fixtures" / "deepseek_v2" / "config.json"
PROMPT = list(range(10, 60))
WAIT_S = 60.0


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """Random weights, with the tokenizer of the tiny model."""
    config = json.loads(FIXTURE.read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 2048}))
    tiny = Path(find_plugin("openinfer.checkpoints", "tiny").load()())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny / name, tmp_path / name)
    return tmp_path


def test_streams_end_with_an_error_and_so_does_the_server_when_a_rank_dies(model_dir: Path) -> None:
    flags = ["--model", str(model_dir), "--load-format", "dummy", "--data-parallel-size", "2", "--rank-host", "process"]
    flags += ["--device", "cpu", "--num-blocks", "64", "--max-num-seqs", "4", "--model-name", "model"]
    with served(flags) as server, httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=WAIT_S) as client:
        asked = {"model": "model", "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
        answers = [client.post("/v1/completions", json=asked).raise_for_status().json() for _ in range(2)]
        first, again = (each["choices"][0]["token_ids"] for each in answers)
        assert first == again
        assert answers[1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 48
        long = {**asked, "max_tokens": 400, "stream": True, "ignore_eos": True}
        with client.stream("POST", "/v1/completions", json=long) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data:")
            os.kill(rank_of(server), signal.SIGKILL)
            rest = [line for line in lines if line]
        assert json.loads(rest[-2].removeprefix("data: "))["error"]["message"] == "the engine failed"
        assert rest[-1] == "data: [DONE]"
        deadline_s = time.monotonic() + WAIT_S
        while state_of(server.pid) != "Z":  # its parent is this process, which has not waited for it
            assert time.monotonic() < deadline_s
            time.sleep(0.05)


def rank_of(server: Served) -> int:
    """The process of rank 1."""
    parents = {int(each.name): stat(each) for each in Path("/proc").iterdir() if each.name.isdigit()}
    beneath = [server.pid]
    for parent in beneath:
        beneath += [child for child, fields in parents.items() if fields[1:2] == [str(parent)]]
    (rank,) = [each for each in beneath if b"worker.process" in Path(f"/proc/{each}/cmdline").read_bytes()]
    return rank


def state_of(pid: int) -> str:
    return stat(Path(f"/proc/{pid}"))[0]


def stat(folder: Path) -> list[str]:
    """State, parent and what follows; nothing of a process that has gone."""
    try:
        return (folder / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
