"""`openinfer ray serve` without Ray's control store: it is killed while streams run, and requests go on being asked.

    python tools/ray/control_store.py --json benchmarks/results/ray/control-store.json

Ray's processes end by themselves when they have not reached their control store for a while (60 s unless told
otherwise), so it is watched for longer than that.
"""

import argparse
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from recorded import begun, say

TESTS = Path(__file__).parents[2] / "packages" / "openinfer-ray" / "tests"
sys.path.insert(0, str(TESTS))
os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "OPENINFER_LOG_LEVEL": "info"}


def main() -> None:
    from test_ray_serve import Server

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=100.0)
    arguments = parser.parse_args()
    seen = begun()
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder) / "log")
        try:
            seen |= watch(server, arguments.streams, arguments.seconds)
            seen["log"] = [line for line in server.log.splitlines() if " INFO " not in line][-20:]
        finally:
            server.end()
    say(seen, arguments.json)


def watch(server: Any, streams: int, seconds: float) -> dict[str, Any]:
    begun = threading.Semaphore(0)
    engines = set(server.engines)
    with ThreadPoolExecutor(streams) as clients:
        running = [clients.submit(server.stream, 400, begun) for _ in range(streams)]
        for _ in running:
            begun.acquire()
        stores = [each for each in server.children if each.name() == "gcs_server"]
        for store in stores:
            store.kill()
        killed_s = time.monotonic()
        at_the_death = Counter(stream.result() for stream in running)

        def ask_on() -> list[tuple[float, str]]:
            ends: list[tuple[float, str]] = []
            while time.monotonic() - killed_s < seconds and server.process.poll() is None:
                try:
                    ends.append((time.monotonic() - killed_s, server.stream(16, begun)))
                except httpx.HTTPError as error:
                    ends.append((time.monotonic() - killed_s, type(error).__name__))
                time.sleep(0.5)
            return ends

        later = [end for ask in [clients.submit(ask_on) for _ in range(streams)] for end in ask.result()]
    wrong = sorted(end for end in later if end[1] != "done")
    return {
        "control_stores_killed": len(stores),
        "streams_at_the_death": dict(at_the_death),
        "later_streams": dict(Counter(end for _, end in later)),
        "first_that_did_not_end_well": [round(wrong[0][0], 1), wrong[0][1]] if wrong else None,
        "watched_s": round(time.monotonic() - killed_s, 1),
        "server_lives": server.process.poll() is None,
        "engines_that_live": len(engines & set(server.engines)) if server.process.poll() is None else 0,
    }


if __name__ == "__main__":
    main()
