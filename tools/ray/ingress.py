"""What a way to an engine costs: the plain server, our server before a replica, and Ray Serve's proxy before that.

    python tools/ray/ingress.py --json benchmarks/results/ray/ingress.json

One engine of the tiny model each, on a CPU, all three there at the same time and measured in turns, so that what else
the machine does falls on all. A step of the tiny model takes milliseconds, so what is before the engine weighs more
here than before a GPU.
"""

import argparse
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
from recorded import begun, say

os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "OPENBLAS_NUM_THREADS": "1"}
COMMAND = [sys.executable, "-m", "openinfer.commands.main"]
ENGINE = ["--max-num-seqs", "64", "--max-waiting", "256"]
RAY = ["--ray-address", "local", "--replica-timeout-s", "120"]
TOKENS = 48
GIVE_UP_S = 600.0


class Arrangement:
    """A command that serves, and where."""

    def __init__(self, name: str, command: list[str], log: Path) -> None:
        self.name = name
        with log.open("wb") as errors:
            self._process = subprocess.Popen([*COMMAND, *command], stdout=subprocess.PIPE, stderr=errors, text=True)
        watchdog = threading.Timer(GIVE_UP_S, self._process.kill)
        watchdog.start()
        assert self._process.stdout is not None
        said = self._process.stdout.readline()
        watchdog.cancel()
        found = re.search(r"on (http\S+?),?\s", said)
        assert found is not None, (said, log.read_text("utf-8", errors="replace")[-3000:])
        self._client = httpx.Client(base_url=found[1], timeout=GIVE_UP_S, limits=httpx.Limits(max_connections=256))

    def stream(self, max_tokens: int, number: int) -> tuple[float, int]:
        """Seconds to the first token, and how many events with text there were."""
        body = {"model": "tiny", "prompt": f"{number} Where is Paris?", "max_tokens": max_tokens, "stream": True}
        body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
        began_s, first_s, tokens = time.perf_counter(), 0.0, 0
        with self._client.stream("POST", "/v1/completions", json=body) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                first_s = first_s or time.perf_counter() - began_s
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
        return first_s, tokens

    def close(self) -> None:
        self._client.close()
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
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    seen = begun(streams=arguments.streams, tokens_each=TOKENS)
    with tempfile.TemporaryDirectory() as folder:
        proxied = ["ray", "serve", "tiny", *RAY, *ENGINE, "--ray-servers", "1", "--port", str(free_port())]
        commands = {
            "plain": ["serve", "tiny", "--port", "0", *ENGINE],
            "tcp ingress": ["ray", "serve", "tiny", "--port", "0", *RAY, *ENGINE],
            "serve proxy": proxied,
        }
        ways = [Arrangement(name, command, Path(folder) / name) for name, command in commands.items()]
        try:
            seen["rounds"] = measure(ways, arguments.streams, arguments.rounds)
        finally:
            for each in ways:
                each.close()
    seen["median"] = medians(seen["rounds"])
    say(seen, arguments.json)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def measure(ways: list[Arrangement], streams: int, rounds: int) -> list[dict[str, Any]]:
    """Each round goes through all ways; the first is left out."""
    measured: list[dict[str, Any]] = []
    with ThreadPoolExecutor(streams) as clients:
        for turn in range(rounds + 1):
            found: dict[str, Any] = {}
            for way in [*ways[turn % len(ways) :], *ways[: turn % len(ways)]]:
                alone_ms = [way.stream(1, 1000 * turn + number)[0] * 1e3 for number in range(15)]
                began_s = time.perf_counter()
                answers = list(clients.map(way.stream, [TOKENS] * streams, range(streams)))
                took_s = time.perf_counter() - began_s
                found[way.name] = {
                    "tokens_per_s": round(sum(tokens for _, tokens in answers) / took_s, 1),
                    "ttft_p50_ms": round(statistics.median(alone_ms), 2),
                    "ttft_p50_under_load_ms": round(statistics.median(first for first, _ in answers) * 1e3, 1),
                }
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
