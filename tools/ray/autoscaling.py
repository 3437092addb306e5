"""`openinfer ray serve --max-replicas`: a second replica comes while tokens wait, and goes without an error.

python tools/ray/autoscaling.py --json benchmarks/results/ray/autoscaling.json
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

from recorded import begun, say

TESTS = Path(__file__).parents[2] / "packages" / "openinfer-ray" / "tests"
sys.path.insert(0, str(TESTS))
os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "OPENINFER_LOG_LEVEL": "info"}
FLAGS = ["--max-replicas", "2", "--scale-waiting-tokens", "16", "--scale-up-after-s", "2", "--scale-down-after-s", "5"]
FLAGS += ["--max-num-seqs", "4"]
PATIENCE_S = 240.0


def main() -> None:
    from test_ray_serve import Server

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--streams", type=int, default=16)
    arguments = parser.parse_args()
    seen = begun(flags=FLAGS)
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder) / "log", replicas=1, flags=FLAGS)
        try:
            seen |= grow_and_shrink(server, arguments.streams)
        finally:
            server.end()
    say(seen, arguments.json)


def grow_and_shrink(server: Any, streams: int) -> dict[str, Any]:
    began_s = time.monotonic()
    busy, over = threading.Event(), threading.Event()
    busy.set()
    ends: Counter[str] = Counter()

    def ask_on(number: int) -> None:
        while not over.is_set():
            if busy.is_set() or number == 0:  # one client goes on, so that a replica goes while it streams
                ends[server.stream(120, threading.Semaphore(0))] += 1
            else:
                time.sleep(0.1)

    with ThreadPoolExecutor(streams) as clients:
        asking = [clients.submit(ask_on, number) for number in range(streams)]
        try:
            second_after_s = since(began_s, server, 2)
            busy.clear()
            quiet_s = time.monotonic()
            gone_after_s = since(quiet_s, server, 1)
        finally:
            over.set()
        for each in asking:
            each.result()
    return {"second_engine_after_s": second_after_s, "gone_again_after_s": gone_after_s, "streams": dict(ends)}


def since(began_s: float, server: Any, engines: int) -> float | None:
    """Seconds until there are so many; None if there are not in time."""
    end_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < end_s:
        assert server.process.poll() is None, server.log
        if len(server.engines) == engines:
            return round(time.monotonic() - began_s, 1)
        time.sleep(0.2)
    return None


if __name__ == "__main__":
    main()
