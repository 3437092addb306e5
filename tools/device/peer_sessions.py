"""Agents' sessions on vLLM's server, played as `sessions.py` plays them on ours: TTFT by turn, alone and many.

    pip install vllm==0.25.1                                                        in an environment of its own
    python3 tools/device/peer_sessions.py qwen3-8b|qwen3-4b 150x16-plain OUT COMMIT [COMMAND ...]
    python3 tools/device/sessions.py qwen3-8b OUT COMMIT alone-150x16-plain early-150x16-plain      ours, the same

The program runs where openinfer is installed, with a GPU. COMMAND starts vLLM's own program: `vllm` if none is given,
else the path of that environment's. Models and shapes are those of `sessions.py`; of a `-plain` one both servers are
asked for tokens alone. vLLM has dummy weights of the same config in BF16, as many KV blocks of 16 tokens, as many rows,
as much host memory for KV (its native offloading), a prefix cache, CUDA graphs and compiled code; all else is its
default.

`alone` is one session without waits, all of it in the pool; `many` the sessions, in a pool of a third of what they
hold. Writes OUT/peer-sessions-MODEL.json after each part, and what the server says to OUT/peer-server.log; where the
server ends early, the end of that is printed.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from published_configs import PUBLISHED
from sessions import SET_UPS, SetUp, Shape, ask_largely, by_turn, played, show, sums, write_model

from openinfer_core.provenance import provenance

START_S, END_S = 300.0, 30.0
SHOWN_LINES = 60
COUNTED = ("vllm:prefix_cache", "vllm:external_prefix_cache", "vllm:num_preemptions", "vllm:kv_offload")
TIMED = ("vllm:time_to_first_token_seconds", "vllm:request_queue_time_seconds", "vllm:request_prefill_time_seconds")
"""Their sums, taken from those of the client's times, leave what passes before and after the engine."""
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


def main() -> int:
    model, new, out, commit, *command = sys.argv[1:]
    set_up, shape = SET_UPS[model], SET_UPS[model].many[new]
    file, log = Path(out) / f"peer-sessions-{model}.json", Path(out) / "peer-server.log"
    file.parent.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {**msgspec.to_builtins(provenance(commit=commit)), "model": model, "parts": {}}
    with tempfile.TemporaryDirectory(prefix="peer-model-") as folder:
        write_model(Path(folder), {**PUBLISHED[model], **set_up.config})
        flags, began_s = flags_of(set_up), time.monotonic()
        with server([*(command or ["vllm"]), "serve", folder, *flags], log) as port:
            report |= {"server": flags, "ready_s": round(time.monotonic() - began_s, 1), "peer": version(port)}
            report["large_s"] = round(ask_largely(port), 2)
            print(*(f"-- {name} {report[name]}" for name in ("peer", "ready_s", "large_s")), sep="\n", flush=True)
            for kind, of_kind in (("alone", replace(shape, sessions=1, wait_s=0.0)), ("many", shape)):
                asked = ("--commit", commit, "--num-token-ids", str(set_up.num_token_ids))
                report["parts"][f"{kind}-{new}"] = part(port, of_kind, "--salt", f"{kind}-{new}", *asked)
                report["by_turn"] = by_turn(report["parts"], [new])
                file.write_text(json.dumps(report, indent=1) + "\n")
    show(report["by_turn"])
    return 1 if any("failed" in found or found["totals"]["failed"] for found in report["parts"].values()) else 0


def part(port: int, shape: Shape, *flags: str) -> dict[str, Any]:
    """Sessions of a shape, with what the server counted meanwhile."""
    began_s, before = time.monotonic(), sums(port)
    found = played(port, shape, "--served-model", "m", *flags)
    after = sums(port)
    counted = [name for name in after if name.startswith(COUNTED) and name.endswith("_total")]
    counted += [f"{name}_{kind}" for name in TIMED for kind in ("sum", "count")]
    found["wall_s"] = round(time.monotonic() - began_s, 1)
    found["counters"] = {name: after.get(name, 0.0) - before.get(name, 0.0) for name in counted}
    print(f"== {flags[1]}, {found['wall_s']} s", *found.get("said", [found.get("failed")]), sep="\n")
    print(found["counters"], flush=True)
    return found


def flags_of(set_up: SetUp) -> list[str]:
    """vLLM's for what ours has; the others are the same for every model."""
    ours = dict(zip(set_up.flags[::2], set_up.flags[1::2], strict=True))
    host_gib = set_up.host.removeprefix("host=").removesuffix("GiB")
    named = {
        "--served-model-name": "m",
        "--host": "127.0.0.1",
        "--dtype": "bfloat16",
        "--load-format": "dummy",
        "--generation-config": "vllm",
        "--block-size": "16",
        "--num-gpu-blocks-override": str(set_up.num_blocks),
        "--max-num-seqs": ours["--max-num-seqs"],
        "--max-model-len": ours["--max-model-tokens"],
        "--kv-offloading-backend": "native",
        "--kv-offloading-size": host_gib,
    }
    flags = [text for pair in named.items() for text in pair]
    return [*flags, "--enable-prefix-caching", "--enable-prompt-tokens-details"]


@contextlib.contextmanager
def server(command: Sequence[str], log: Path) -> Iterator[int]:
    """The port of a server that answers; it and its processes end with it.

    Raises:
        SystemExit: it ended, or did not answer in time; the end of its log is printed.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*command, "--port", str(port)],
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **ENVIRONMENT},
            start_new_session=True,
        )
    try:
        begun_s = time.monotonic()
        while not answers(port):
            if process.poll() is not None or time.monotonic() - begun_s > START_S:
                sys.exit(f"no server, its code is {process.poll()}:\n{end_of(log)}")
            time.sleep(0.25)
        yield port
    except (OSError, subprocess.SubprocessError, json.JSONDecodeError):
        print(end_of(log), flush=True)
        raise
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5.0) as response:
            return response.status == 200
    except OSError:
        return False


def end_of(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-SHOWN_LINES:])


def version(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/version") as response:
        return f"vLLM {json.loads(response.read())['version']}"


if __name__ == "__main__":
    sys.exit(main())
