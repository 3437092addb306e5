"""NIXL itself, over UCX on this machine, between processes: `python -m tools.unlocked nixl`.

Skipped where it is not installed: its wheel names PyTorch, which no environment of ours may have.
"""

import http.client
import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from openinfer_bench.served import Served, served

pytestmark = pytest.mark.skipif(
    all(find_spec(name) is None for name in ("nixl", "nixl_cu13", "nixl_cu12")), reason="NIXL is not installed"
)

BLOCK = 8
PATIENCE_S = 180.0
SHAPE = {
    "block-size-tokens": BLOCK,
    "num-blocks": 160,
    "max-num-seqs": 4,
    "max-model-tokens": 1024,
    "batch-invariant": "true",
    # A busy machine may take seconds for what takes milliseconds: no time decides a test here.
    "kv-load-timeout-ms": 150_000,
    "kv-handover-timeout-ms": 150_000,
}
PATH = "/inference/v1/generate"


def flags(options: dict[str, Any]) -> list[str]:
    return ["--model", "tiny", *(word for name, value in options.items() for word in (f"--{name}", str(value)))]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


class Engines:
    """One that prefills, one that decodes, and one alone."""

    def __init__(self, folder: Path, stack: ExitStack, *, tier: str) -> None:
        self._name = tier
        (folder / "key").write_bytes(b"k" * 32)
        (folder / "token").write_bytes(b"t" * 32)
        ports = (free_port(), free_port())
        self.alone = stack.enter_context(served(flags(SHAPE)))
        self.prefill, self.decode = (
            stack.enter_context(served(flags({**SHAPE, **self._tier(folder, *each)}))) for each in (ports, ports[::-1])
        )

    def _tier(self, folder: Path, here: int, there: int) -> dict[str, Any]:
        address = f"127.0.0.1:{here},64MiB,token_file={folder / 'token'},peers=127.0.0.1:{there},timeout_s=60"
        return {"kv-tier": f"{self._name}={address}", "kv-transfer": self._name, "kv-key-file": folder / "key"}


@pytest.fixture(params=["nixl", "nixl-gpu"])  # without a GPU both are in this machine's memory
def engines(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engines]:
    with ExitStack() as stack:
        yield Engines(tmp_path, stack, tier=request.param)


def ask(server: Served, token_ids: list[int], **fields: Any) -> dict[str, Any]:
    sampling = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True, **fields.pop("sampling", {})}
    connection = http.client.HTTPConnection(server.host, server.port, timeout=PATIENCE_S)
    try:
        body = {"token_ids": token_ids, "sampling_params": sampling, **fields}
        connection.request("POST", PATH, json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        answer = json.loads(response.read())
        assert response.status == 200, answer
        return answer
    finally:
        connection.close()


def prefilled(engines: Engines, token_ids: list[int]) -> dict[str, Any]:
    asked = {"do_remote_decode": True, "do_remote_prefill": False}
    return ask(engines.prefill, token_ids, sampling={"max_tokens": 1}, kv_transfer_params=asked)["kv_transfer_params"]


def cached(answer: dict[str, Any]) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_decode_reads_a_prompts_blocks_out_of_the_prefill_engines_memory(engines: Engines) -> None:
    conversation = list(range(20, 75))
    for turn in range(5):
        left = prefilled(engines, conversation)
        assert left["openinfer"]["tokens"] == len(conversation) // BLOCK * BLOCK
        answer = ask(engines.decode, conversation, kv_transfer_params=left)
        assert answer["choices"] == ask(engines.alone, conversation)["choices"]
        assert cached(answer) == (len(conversation) - 1) // BLOCK * BLOCK, "a block was computed"
        conversation = [*conversation, *answer["choices"][0]["token_ids"], *range(90 + turn, 110 + turn)]


def test_a_prefill_engine_that_is_killed_costs_a_computation(engines: Engines) -> None:
    prompt = list(range(90, 140))
    left = prefilled(engines, prompt)
    kill_engine_of(engines.prefill.pid)
    answer = ask(engines.decode, prompt, kv_transfer_params=left)
    assert answer["choices"] == ask(engines.alone, prompt)["choices"]
    assert cached(answer) == 0
    # What it saves in its own memory is found as before.
    assert cached(ask(engines.decode, prompt)) == (len(prompt) - 1) // BLOCK * BLOCK


def kill_engine_of(server: int) -> None:
    """The server's child has the memory that peers read."""
    (engine,) = (pid for pid, (parent, _) in processes().items() if parent == server)
    os.kill(engine, signal.SIGKILL)
    give_up_s = time.monotonic() + PATIENCE_S
    while processes().get(engine, (0, "Z"))[1] != "Z":  # gone, or not yet waited for
        assert time.monotonic() < give_up_s
        time.sleep(0.01)


def processes() -> dict[int, tuple[int, str]]:
    """Parent and state of every process, from proc(5)."""
    found: dict[int, tuple[int, str]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            line = re.fullmatch(r"(\d+) \(.*\) (\S) (\d+) .*", path.read_text("utf-8", "replace").strip(), re.DOTALL)
            if line is not None:
                found[int(line[1])] = (int(line[3]), line[2])
    return found
