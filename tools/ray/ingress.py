"""What a way to an engine costs: the plain server, our server before a replica, and Ray Serve's proxy before that.

    python tools/ray/ingress.py --json benchmarks/results/ray/ingress.json
    python tools/ray/ingress.py --model DIR --device cuda --load-format dummy --num-blocks 8192     (on a GPU)

One engine each, all three there at the same time and measured in turns, so that what else the machine does falls on
all. Flags that are not listed go to all servers. Load is that of `openinfer bench serve`: token ids, from processes of
their own. By default the model is the tiny one on a CPU, whose steps take milliseconds.
"""

import argparse
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
from recorded import begun, say

from openinfer_bench.serve.figures import row_of
from openinfer_bench.serve.load import send_load
from openinfer_bench.serve.messages import Target
from openinfer_bench.serve.workloads import Sizes, phases

os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "OPENBLAS_NUM_THREADS": "1"}
COMMAND = [sys.executable, "-m", "openinfer.commands.main"]
ENGINE = ["--max-num-seqs", "64", "--max-waiting", "256"]
RAY = ["--ray-address", "local", "--replica-timeout-s", "120"]
GIVE_UP_S = 600.0
FIGURES = ("tokens_per_s", "ttft_p50_ms", "ttft_p50_under_load_ms", "itl_p99_under_load_ms", "failed")


class Arrangement:
    """A command that serves, and where."""

    def __init__(self, name: str, command: list[str], log: Path) -> None:
        self.name, self._log = name, log
        with log.open("wb") as errors:
            self._process = subprocess.Popen([*COMMAND, *command], stdout=subprocess.PIPE, stderr=errors, text=True)
        watchdog = threading.Timer(GIVE_UP_S, self._process.kill)
        watchdog.start()
        assert self._process.stdout is not None
        said = self._process.stdout.readline()
        watchdog.cancel()
        found = re.search(r"on (http\S+?),?\s", said)
        assert found is not None, (said, self._said())
        url = urlsplit(found[1])
        (model,) = httpx.get(f"{found[1]}/v1/models", timeout=GIVE_UP_S).json()["data"]
        self._target = Target(host=str(url.hostname), port=url.port or 80, path="", model=model["id"])

    def send(self, workload: str, sizes: Sizes, *, processes: int) -> dict[str, Any]:
        """A row of `openinfer bench serve`; requests that failed are in it, and shown here."""
        (phase,) = phases(workload, sizes)
        outcomes = send_load(self._target, phase, processes=processes)[phase.thrown_away :]
        row = row_of(workload, outcomes)
        if row["failed"]:
            print(self.name, workload, row["failed"], row["errors"], self._said(), flush=True)
        return row

    def _said(self) -> str:
        return self._log.read_text("utf-8", errors="replace")[-3000:]

    def close(self) -> None:
        children = psutil.Process(self._process.pid).children(recursive=True)
        self._process.terminate()
        try:
            self._process.wait(120)
        except subprocess.TimeoutExpired:
            self._process.kill()
        for each in children:
            if each.is_running():
                each.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--model", default="tiny", help="a folder, or a name")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--output-tokens", type=int, default=48)
    parser.add_argument("--num-token-ids", type=int, default=256)
    parser.add_argument("--processes", type=int, default=1, help="of clients")
    given, flags = parser.parse_known_args()
    seen = begun(**{name: value for name, value in vars(given).items() if name != "json"}, flags=flags)
    seen["model"] = Path(given.model).name
    engine = [*ENGINE, *flags]
    with tempfile.TemporaryDirectory() as folder:
        proxied = ["ray", "serve", given.model, *RAY, *engine, "--ray-servers", "1", "--port", str(free_port())]
        commands = {
            "plain": ["serve", given.model, "--port", "0", *engine],
            "tcp ingress": ["ray", "serve", given.model, "--port", "0", *RAY, *engine],
            "serve proxy": proxied,
        }
        ways: list[Arrangement] = []
        try:
            for name, command in commands.items():
                ways.append(Arrangement(name, command, Path(folder) / name))
            seen["rounds"] = measure(ways, given)
        finally:
            for each in ways:
                each.close()
    seen["median"] = medians(seen["rounds"])
    say(seen, given.json)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def measure(ways: list[Arrangement], given: argparse.Namespace) -> list[dict[str, Any]]:
    """Each round goes through all ways; the first is left out."""
    measured: list[dict[str, Any]] = []
    for turn in range(given.rounds + 1):
        sizes = Sizes(
            prompt_tokens=given.prompt_tokens,
            output_tokens=given.output_tokens,
            seconds=0.0,
            num_token_ids=given.num_token_ids,
            seed=turn,
        )
        found: dict[str, Any] = {}
        for way in [*ways[turn % len(ways) :], *ways[: turn % len(ways)]]:
            alone = way.send("bs1", sizes, processes=1)
            loaded = way.send(f"conc={given.streams}", sizes, processes=given.processes)
            times = alone["ttft_ms"]["p50"], loaded["ttft_ms"]["p50"], loaded["itl_ms"]["p99"]
            failed = alone["failed"] + loaded["failed"]
            found[way.name] = dict(zip(FIGURES, (loaded["out_tok_s"], *times, failed), strict=True))
        print(found, flush=True)
        if turn:
            measured.append(found)
    return measured


def medians(rounds: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Of each way, and of what it is to the plain server in the same round."""
    found: dict[str, dict[str, float]] = {}
    for name in rounds[0]:
        found[name] = {
            figure: round(statistics.median(each[name][figure] for each in rounds), 2) for figure in rounds[0][name]
        }
        share = statistics.median(each[name]["tokens_per_s"] / each["plain"]["tokens_per_s"] for each in rounds)
        more_ms = statistics.median(each[name]["ttft_p50_ms"] - each["plain"]["ttft_p50_ms"] for each in rounds)
        found[name] |= {"tokens_per_s_of_plain": round(share, 3), "ttft_p50_more_ms": round(more_ms, 2)}
    return found


if __name__ == "__main__":
    main()
