"""Real workers under Dynamo's own runtime and frontend, with file discovery: `python -m tools.unlocked dynamo`.

Skipped where Dynamo is not installed: its wheel requires a simulator that no public index has, so that no environment
of ours can be locked with it.
"""

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from openinfer import LLM

pytestmark = pytest.mark.skipif(find_spec("dynamo") is None, reason="Dynamo is not installed")

PATIENCE_S = 180.0
BLOCK = 8
SHAPE = {"block_size_tokens": BLOCK, "num_blocks": 160, "max_num_seqs": 4, "max_model_tokens": 512}
FLAGS = [word for name, value in SHAPE.items() for word in (f"--{name.replace('_', '-')}", str(value))]
PROMPTS = [
    f"Of the {animal} it is told that it was once seen in a field, and that " for animal in ("fox", "hen", "owl")
]


def sealed(num_tokens: int) -> int:
    """Tokens of the blocks that a prompt can begin on: its last token is computed in any case."""
    return (num_tokens - 1) // BLOCK * BLOCK


def wait(condition: Callable[[], bool], what: Callable[[], str]) -> None:
    give_up_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up_s, what()
        time.sleep(0.05)


class Fleet:
    """Workers and one frontend, which find each other in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self._running: list[subprocess.Popen[bytes]] = []  # those that no test has ended
        with socket.create_server(("127.0.0.1", 0)) as taken:
            self.port: int = taken.getsockname()[1]
        self.environment = {
            **os.environ,
            "DYN_FILE_KV": str(folder / "registry"),
            "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0",
            "DYN_LOG": "warn",
            "OPENBLAS_NUM_THREADS": "1",
            **dict.fromkeys(("DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_EVENT_PLANE_HOST"), "127.0.0.1"),
        }

    def _spawn(self, *words: str) -> subprocess.Popen[bytes]:
        log = (self._folder / f"log-{len(self._processes)}").open("wb")
        process = subprocess.Popen(words, env=self.environment, stdout=log, stderr=log)
        log.close()
        self._processes.append(process)
        self._running.append(process)
        return process

    def worker(self, *flags: str) -> subprocess.Popen[bytes]:
        command = str(Path(sys.executable).with_name("openinfer"))
        return self._spawn(command, "dynamo", "tiny", "--discovery-backend", "file", *FLAGS, *flags)

    def frontend(self, *flags: str) -> None:
        address = ("--http-host", "127.0.0.1", "--http-port", str(self.port))
        self._spawn(sys.executable, "-m", "dynamo.frontend", "--discovery-backend", "file", *address, *flags)

    def request(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            connection.request(method, path, json.dumps(body), {"content-type": "application/json"})
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def ended(self, process: subprocess.Popen[bytes]) -> int:
        """Waits for the end of one that a test has ended; its exit code."""
        code = process.wait(PATIENCE_S)
        self._running.remove(process)
        return code

    def wait_for_workers(self, number: int) -> None:
        def are_there() -> bool:
            assert all(process.poll() is None for process in self._running), self.logs()
            with contextlib.suppress(OSError, ValueError, http.client.HTTPException):
                _, health = self.request("GET", "/health")
                found = [each for each in health.get("instances", []) if each.get("endpoint") == "generate"]
                status, _ = self.request("POST", "/v1/completions", {"model": "tiny", "prompt": "a", "max_tokens": 1})
                return len(found) == number and status == 200
            return False

        wait(are_there, lambda: f"{number} workers are not served: {self.logs()}")

    def complete(self, prompt: str, **fields: Any) -> tuple[str, Any]:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0.0, **fields}
        status, answer = self.request("POST", "/v1/completions", body)
        assert status == 200, (answer, self.logs())
        return answer["choices"][0]["text"], answer["usage"]

    def logs(self) -> str:
        return "\n".join(path.read_text("utf-8", "replace")[-2000:] for path in sorted(self._folder.glob("log-*")))

    def close(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.terminate()
        for process in self._processes:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path)
    try:
        yield fleet
    finally:
        fleet.close()


@pytest.fixture(scope="module")
def expected() -> dict[str, str]:
    """What one engine says in this process."""
    with LLM("tiny", **SHAPE) as llm:
        return {prompt: llm.generate([prompt], max_tokens=12, temperature=0.0)[0].text for prompt in PROMPTS}


def test_a_worker_serves_dynamos_frontend(fleet: Fleet, expected: dict[str, str]) -> None:
    worker = fleet.worker()
    fleet.frontend()
    fleet.wait_for_workers(1)
    for prompt in PROMPTS:
        text, first = fleet.complete(prompt)
        again, second = fleet.complete(prompt)
        assert text == again == expected[prompt]
        assert second["prompt_tokens_details"]["cached_tokens"] == sealed(first["prompt_tokens"])
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "What is a stone?"}], "max_tokens": 6}
    status, answer = fleet.request("POST", "/v1/chat/completions", {**chat, "logprobs": True, "top_logprobs": 2})
    assert status == 200
    entries = answer["choices"][0]["logprobs"]["content"]
    assert len(entries) == answer["usage"]["completion_tokens"]
    assert all(len(entry["top_logprobs"]) == 2 and entry["logprob"] <= 0 for entry in entries)
    for refused in ({"n": 2}, {"nvext": {"max_thinking_tokens": 5}}):
        body = {"model": "tiny", "prompt": "a", "max_tokens": 2, **refused}
        status, answer = fleet.request("POST", "/v1/completions", body)
        assert status == 400, answer
    worker.terminate()
    assert fleet.ended(worker) == 0, fleet.logs()


def test_a_router_that_reads_events_sends_a_prefix_to_where_it_is(fleet: Fleet) -> None:
    fleet.worker()
    fleet.worker()
    fleet.frontend("--router-mode", "kv")
    fleet.wait_for_workers(2)
    prompts = [f"{number}, a number of which much is told: " + PROMPTS[number % 3] * 2 for number in range(8)]
    lengths = [fleet.complete(prompt, max_tokens=1)[1]["prompt_tokens"] for prompt in prompts]

    def are_found() -> bool:  # events are on their way for a moment
        usages = [fleet.complete(prompt, max_tokens=1)[1] for prompt in prompts]
        found = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
        return found == [sealed(length) for length in lengths]

    wait(are_found, lambda: f"prefixes are not found where they are: {fleet.logs()}")


def test_prefill_and_decode_apart_say_the_same(fleet: Fleet, tmp_path: Path, expected: dict[str, str]) -> None:
    from openinfer_kv_offload.testing.servers import ValkeyServer

    key = tmp_path / "key"
    key.write_bytes(b"k" * 32)
    (tmp_path / "valkey").mkdir()
    with ValkeyServer(tmp_path / "valkey") as valkey:
        tier = ("--kv-tier", f"valkey={valkey.url},64MiB,timeout_s=300", "--kv-transfer", "valkey")
        shared = (*tier, "--kv-key-file", str(key), "--kv-load-timeout-ms", "300000")
        prefiller = ("--role", "prefill", *shared, "--kv-handover-timeout-ms", "300000")
        prefill = fleet.worker(*prefiller)
        fleet.worker("--role", "decode", *shared)
        fleet.frontend()
        fleet.wait_for_workers(2)
        for prompt in PROMPTS[:2]:
            text, usage = fleet.complete(prompt)
            assert text == expected[prompt]
            assert usage["prompt_tokens_details"]["cached_tokens"] == sealed(usage["prompt_tokens"])
        prefill.terminate()
        assert fleet.ended(prefill) == 0
        fleet.worker(*prefiller)  # until it is there, Dynamo's frontend answers 503
        fleet.wait_for_workers(2)
        assert fleet.complete(PROMPTS[2])[0] == expected[PROMPTS[2]]


def test_an_engine_that_is_killed_ends_its_worker_and_the_next_one_serves(
    fleet: Fleet, expected: dict[str, str]
) -> None:
    worker = fleet.worker()
    fleet.frontend()
    fleet.wait_for_workers(1)
    os.kill(engine_of(worker), signal.SIGKILL)
    assert fleet.ended(worker) == 1, fleet.logs()
    fleet.worker()
    fleet.wait_for_workers(1)
    assert fleet.complete(PROMPTS[0])[0] == expected[PROMPTS[0]]


def engine_of(worker: subprocess.Popen[bytes]) -> int:
    """The process of the worker's engine, its only child."""
    children: list[int] = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # others end meanwhile
            line = path.read_text("utf-8", "replace").strip()
            found = re.fullmatch(r"(\d+) \(.*\) \S (\d+) .*", line, re.DOTALL)
            if found is not None and int(found[2]) == worker.pid:
                children.append(int(found[1]))
    (engine,) = children
    return engine
