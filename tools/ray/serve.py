"""`openinfer ray serve` timed: the start, a replica's death under load, its successor, and an application that drains.

    python tools/ray/serve.py --json benchmarks/results/ray/serve.json

A cluster of this machine alone, on a CPU, with the tiny model: what is shown is that nothing hangs and how long each
phase takes here, not what a cluster does.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from recorded import begun, say

TESTS = Path(__file__).parents[2] / "packages" / "openinfer-ray" / "tests"
sys.path.insert(0, str(TESTS))
os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "OPENINFER_LOG_LEVEL": "info"}


def main() -> None:
    from test_ray_serve import COMMAND, Server

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--streams", type=int, default=32)
    arguments = parser.parse_args()
    seen = begun()
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder) / "log")
        try:
            seen["serving_after_s"] = since(began_s)
            seen |= death(server, arguments.streams)
            seen |= drain(server, COMMAND, arguments.streams)
            began_s = time.monotonic()
            seen["exit_code"] = server.stop()
            seen["ended_after_s"] = since(began_s)
        finally:
            server.end()
    say(seen, arguments.json)


def since(began_s: float) -> float:
    return round(time.monotonic() - began_s, 2)


def death(server: Any, streams: int) -> dict[str, Any]:
    begun = threading.Semaphore(0)
    with ThreadPoolExecutor(streams) as clients:
        answers = [clients.submit(server.stream, 400, begun) for _ in range(streams)]
        for _ in answers:
            begun.acquire()
        victim = next(iter(server.engines.values()))
        victim.parent().kill()
        killed_s = time.monotonic()
        ends = Counter(answer.result() for answer in answers)
        ended_after_s = since(killed_s)
    wait(server, lambda: " is there" in server.log)
    successor_after_s = since(killed_s)
    begun = threading.Semaphore(0)
    with ThreadPoolExecutor(streams) as clients:
        after = Counter(clients.map(lambda _: server.stream(16, begun), range(streams)))
    return {
        "streams_at_the_death": dict(ends),
        "all_ended_after_s": ended_after_s,
        "successor_serves_after_s": successor_after_s,
        "streams_after_it": dict(after),
    }


def drain(server: Any, command: list[str], streams: int) -> dict[str, Any]:
    address = re.search(r"Ray \S+ at (\S+)", server.log)
    assert address is not None
    begun = threading.Semaphore(0)
    with ThreadPoolExecutor(streams) as clients:
        answers = [clients.submit(server.stream, 400, begun) for _ in range(streams)]
        for _ in answers:
            begun.acquire()
        began_s = time.monotonic()
        deleted = subprocess.run([*command, "delete", "--ray-address", address[1]], check=False).returncode
        deleted_after_s = since(began_s)
        ends = Counter(answer.result() for answer in answers)
    return {"delete_exit_code": deleted, "deleted_after_s": deleted_after_s, "streams_at_the_delete": dict(ends)}


def wait(server: Any, is_so: Callable[[], bool]) -> None:
    while not is_so():
        assert server.process.poll() is None, server.log
        time.sleep(0.05)


if __name__ == "__main__":
    main()
