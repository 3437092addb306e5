"""Data-parallel ranks behind `openinfer serve`: habits of clients, a load, a rank that is killed, and an engine alone.

    python3 tools/device/data_parallel_http.py CONFIG.json OUT.json [--ranks 2] [--loads 64 256] [--device cpu]

The model is CONFIG.json with random weights and the tokenizer of the tiny model. In turns: greedy requests one after
the other, whose ids are compared with those of an engine without a server; choices, log-probabilities, a grammar, a
chat whose prefix is cached, and clients that leave; `openinfer bench serve`, also with clients that leave; with
`--tensor` the same load on tensor-parallel ranks; last, rank 1 is killed while streams run. What a server of such
ranks refuses at its start is asked with `--refusals`.
"""

import argparse
import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from openinfer_bench.served import OPENINFER, Served, served
from openinfer_core import GenerateRequest, RequestId, SamplingParams, claim, find_plugin, list_plugins, read_config
from openinfer_core.plugins import MODELS
from openinfer_core.provenance import provenance
from openinfer_engine import resolve
from openinfer_engine.engine_spec import EngineSpec
from openinfer_engine.launch import build_engine_loop
from openinfer_engine.testing import run_at_once
from openinfer_engine.worker.process_group import start_workers

PROMPTS, PROMPT_TOKENS, SAID_TOKENS = 8, 50, 24
LEAVERS, STREAMS = 16, 8
TOKENIZER_IDS = 2000  # of the tiny model's tokenizer
WAIT_S = 60.0
LOAD_SHAPE = {"cuda": "512x128", "cpu": "32x8"}
REFUSED = (
    ["--speculative", "ngram"],
    ["--lora", "one=FOLDER"],
    ["--tensor-parallel-size", "2"],
    ["--enable-sleep", "true"],
    ["--kv-events", "tcp://127.0.0.1:5557"],
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--loads", nargs="*", type=int, default=[64, 256])
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="further flags of the server, last")
    parser.add_argument("--tensor", action="store_true", help="the load on tensor-parallel ranks, too")
    parser.add_argument("--refusals", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model_dir = make_model(given.config, Path(folder) / "model")
        found: dict[str, Any] = msgspec.to_builtins(provenance(commit=os.environ.get("COMMIT")))
        found |= {"ranks": given.ranks, "flags": given.flags}

        def note(name: str, value: object) -> None:
            found[name] = value
            print(name, json.dumps(value)[:600], flush=True)
            given.out.write_text(json.dumps(found, indent=2) + "\n")  # what there is, should the time be up

        measure(given, model_dir, note)


def measure(given: argparse.Namespace, model_dir: Path, note: Callable[[str, object], None]) -> None:
    flags = ["--model", str(model_dir), "--device", given.device, "--load-format", "dummy", *given.flags]
    data = [*flags, "--data-parallel-size", str(given.ranks)]
    if given.device == "cpu":
        data += ["--rank-host", "process"]
    with open_server(data) as server:
        note("ready_s", round(server.ready_s, 2))
        said = greedy(server)
        note("habits", habits(server))
        for load in given.loads:
            note(f"load {load}", loaded(server, load, given.device))
        if given.loads:
            note("load with leavers", loaded(server, max(given.loads), given.device, "--abort-share", "0.2"))
        note("open requests at the end", open_requests(server))
    note("greedy against an engine alone", {"equal": same(alone(given, model_dir), said), "of": len(said)})
    if given.tensor:
        with open_server([*flags, "--tensor-parallel-size", str(given.ranks)]) as server:
            for load in given.loads:
                note(f"tensor parallel: load {load}", loaded(server, load, given.device))
    with open_server(data) as server:
        note("greedy in a second server", {"equal": same(said, greedy(server)), "of": len(said)})
        note("rank killed", killed(server))
    if given.refusals:
        note("refused", [refused([*data, *each]) for each in REFUSED])


def make_model(config: Path, folder: Path) -> Path:
    tiny = Path(find_plugin("openinfer.checkpoints", "tiny").load()())
    folder.mkdir()
    shutil.copy(config, folder / "config.json")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny / name, folder / name)
    return folder


@contextlib.contextmanager
def open_server(flags: Sequence[str]) -> Generator[Served]:
    with served([*flags, "--model-name", "model"]) as server:
        yield server


def post(server: Served, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection(server.host, server.port, timeout=WAIT_S)
    with contextlib.closing(connection):
        connection.request("POST", path, json.dumps({"model": "model", **body}), {"content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


def prompts(seed: int = 0) -> list[list[int]]:
    return np.random.default_rng(seed).integers(0, TOKENIZER_IDS, (PROMPTS, PROMPT_TOKENS)).tolist()


def greedy(server: Served) -> list[list[int]]:
    said: list[list[int]] = []
    for prompt in prompts():
        asked = {"prompt": prompt, "temperature": 0, "max_tokens": SAID_TOKENS, "ignore_eos": True}
        status, answer = post(server, "/v1/completions", {**asked, "return_token_ids": True})
        require(status == 200, answer)
        said.append(answer["choices"][0]["token_ids"])
    return said


def alone(given: argparse.Namespace, model_dir: Path) -> list[list[int]]:
    """The same requests one after the other, of an engine of this process."""
    family: Any = claim(read_config(model_dir), list_plugins(MODELS))[0]
    asked = {"device": given.device, "load_format": "dummy", "data_parallel_size": given.ranks, "rank_host": "process"}
    options = msgspec.convert(asked, family.options_type)
    processes = start_workers(EngineSpec.of(family.definition, model_dir, options), options)
    loop: Any = build_engine_loop(resolve(family.definition, model_dir, options), processes)
    said: list[list[int]] = []
    with contextlib.closing(loop):
        for place, prompt in enumerate(prompts()):
            sampling = SamplingParams(max_tokens=SAID_TOKENS, temperature=0.0)
            request = GenerateRequest(request_id=RequestId(place), prompt_token_ids=tuple(prompt), sampling=sampling)
            said.append(list(run_at_once(loop, [request])[request.request_id].token_ids))
    return said


def same(first: Sequence[Sequence[int]], second: Sequence[Sequence[int]]) -> int:
    return sum(list(one) == list(other) for one, other in zip(first, second, strict=True))


def habits(server: Served) -> dict[str, Any]:
    """What clients do besides streams of tokens; whatever is not as it should be raises."""
    found: dict[str, Any] = {}
    prompt = prompts(1)[0]
    status, answer = post(
        server, "/v1/completions", {"prompt": prompt, "n": 3, "max_tokens": 6, "seed": 1, "logprobs": 2}
    )
    require(status == 200 and len(answer["choices"]) == 3, answer)
    require(all(choice["logprobs"]["token_logprobs"] for choice in answer["choices"]), answer)
    found["choices with log-probabilities"] = len(answer["choices"])
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    chat = [{"role": "user", "content": "Say a number. " * 20}]
    status, answer = post(server, "/v1/chat/completions", {"messages": chat, "response_format": form, "max_tokens": 60})
    require(status == 200, answer)
    first = answer["choices"][0]
    found["grammar"] = [first["finish_reason"], first["message"]["content"][:40]]
    if first["finish_reason"] == "stop":
        require(json.loads(first["message"]["content"])["a"] in (1, 2), answer)
    chat += [{"role": "assistant", "content": first["message"]["content"]}, {"role": "user", "content": "Another."}]
    status, answer = post(server, "/v1/chat/completions", {"messages": chat, "max_tokens": 4})
    require(status == 200, answer)
    found["cached tokens of the next turn"] = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    require(found["cached tokens of the next turn"] > 0, answer)
    status, answer = post(server, "/v1/completions", {"prompt": prompt, "max_tokens": -1})
    require(status in (400, 422), answer)
    for _ in range(LEAVERS):
        leave(server)
    found["left open by clients that left"] = open_requests(server)
    require(found["left open by clients that left"] == 0, found)
    return found


def stream(server: Served, *, max_tokens: int, seed: int) -> socket.socket:
    """A connection whose stream has begun."""
    prompt = prompts(seed)[seed % PROMPTS]
    asked = {"model": "model", "prompt": prompt, "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
    body = json.dumps({**asked, "return_token_ids": True}).encode()
    link = socket.create_connection((server.host, server.port), WAIT_S)
    head = "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    link.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    begun = b""
    while b"data:" not in begun:
        got = link.recv(1 << 16)
        begun += got
        require(bool(got) and (b" 200 " in begun[:16] or len(begun) < 16), begun.decode())
    return link


def leave(server: Served) -> None:
    stream(server, max_tokens=300, seed=2).close()


def rest(link: socket.socket) -> bytes:
    """What comes until the end of a stream, or of its connection."""
    got = b""
    with contextlib.closing(link), contextlib.suppress(ConnectionError):
        while b"[DONE]" not in got and (more := link.recv(1 << 16)):
            got = got[-4096:] + more
    return got


def open_requests(server: Served) -> int:
    """As the server counts them, once it has heard of clients that left."""
    end_s = time.monotonic() + WAIT_S
    while (count := counted(server)) and time.monotonic() < end_s:
        time.sleep(0.1)
    return count


def counted(server: Served) -> int:
    connection = http.client.HTTPConnection(server.host, server.port, timeout=WAIT_S)
    with contextlib.closing(connection):
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
    names = ("openinfer_requests_running", "openinfer_requests_waiting")
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith(names))


def loaded(server: Served, load: int, device: str, *flags: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "load.json"
        command = [
            *OPENINFER,
            "bench",
            "serve",
            "--url",
            f"http://{server.host}:{server.port}",
            "--served-model",
            "model",
        ]
        command += [
            "--workload",
            f"conc={load}:{LOAD_SHAPE[device]}",
            "--num-token-ids",
            str(TOKENIZER_IDS),
            "--processes",
            "4",
        ]
        done = subprocess.run([*command, "--json", str(out), *flags], check=False, capture_output=True, text=True)
        require(done.returncode == 0, done.stderr[-2000:])
        (row,) = json.loads(out.read_text())["rows"]
    return {name: row[name] for name in ("ok", "failed", "out_tok_s", "ttft_ms", "tpot_ms", "itl_ms") if name in row}


def killed(server: Served) -> dict[str, Any]:
    """Rank 1 is killed while streams run: how they end, what the server says, and when it ends."""
    links = [stream(server, max_tokens=400, seed=seed) for seed in range(STREAMS)]
    victim = rank_process(server.pid)
    begin_s = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    with ThreadPoolExecutor(STREAMS) as threads:
        ends = list(threads.map(rest, links))
    found: dict[str, Any] = {"streams": STREAMS, "ended_s": round(time.monotonic() - begin_s, 2)}
    found["ended with an error"] = sum(b"error" in each for each in ends)
    found["said last"] = ends[0][-300:].decode(errors="replace")
    try:
        status, answer = post(server, "/v1/completions", {"prompt": prompts()[0], "max_tokens": 2})
        found["next request"] = [status, json.dumps(answer)[:200]]
    except OSError as error:
        found["next request"] = [0, f"{type(error).__name__}: {error}"]
    while alive(server.pid) and time.monotonic() < begin_s + WAIT_S:
        time.sleep(0.05)
    found["server ended"], found["server_ended_s"] = not alive(server.pid), round(time.monotonic() - begin_s, 2)
    return found


def rank_process(parent: int) -> int:
    """The process of rank 1 beneath a server."""
    parents = {int(each.name): each for each in Path("/proc").iterdir() if each.name.isdigit()}
    children: dict[int, list[int]] = {}
    for number, folder in parents.items():
        with contextlib.suppress(OSError):
            children.setdefault(int((folder / "stat").read_text().rpartition(")")[2].split()[1]), []).append(number)
    beneath = [parent]
    for each in beneath:
        beneath += children.get(each, [])
    for each in beneath:
        if b"openinfer_engine.worker.process" in (Path("/proc") / str(each) / "cmdline").read_bytes():
            return each
    raise RuntimeError(f"no rank beneath {parent}")


def alive(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z"


def refused(flags: Sequence[str]) -> dict[str, Any]:
    done = subprocess.run(
        [*OPENINFER, "serve", *flags, "--port", "0"], check=False, capture_output=True, text=True, timeout=5 * WAIT_S
    )
    said = [line for line in done.stderr.splitlines() if line.strip()]
    return {"flags": list(flags[-2:]), "code": done.returncode, "said": said[-1][:300] if said else ""}


def require(is_so: object, said: object) -> None:
    if not is_so:
        raise RuntimeError(str(said)[:2000])


if __name__ == "__main__":
    sys.exit(main())
