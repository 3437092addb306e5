"""`openinfer bench frontend`: what the HTTP frontend costs per streamed token, against the floor.

The floor is a C program that calls `send()` once per token and does nothing else. Floor and server take turns in
one run, with the same number of streams, steps and bytes per event, before the same C client; the figure is the
CPU time of the streaming process (user and system) per 100,000 tokens, the server's over the floor's. The server
runs before a simulated engine in a process of its own, whose tokens carry the time they were made, from which the
client tells the lag of every token. Absolute figures of different machines do not compare; the ratio does.
"""

import argparse
import json
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from openinfer.frontend_bench.measure import Bench, Sample
from openinfer_core import Refused

RATE_TOKENS_PER_S = 16_000
_HERE = Path(__file__).resolve().parent


def run(argv: Sequence[str]) -> int:
    """Measures and prints a table; `--json FILE` also writes every sample."""
    arguments = _parser().parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="openinfer-bench-") as folder:
        bench = Bench(Path(folder), floor=_compile("floor", folder), client=_compile("client", folder))
        rows = [_measure(bench, arguments, streams) for streams in arguments.streams]
    print(_table(rows))
    if arguments.json is not None:
        report = {"set_up": _set_up(arguments), "rows": rows}
        Path(arguments.json).write_text(json.dumps(report, indent=2) + "\n")
    return 0


def _measure(bench: Bench, arguments: argparse.Namespace, streams: int) -> dict[str, Any]:
    """Floor and server in turns; medians, and the runs behind them."""
    steps_per_s = arguments.rate / streams
    steps = max(1, round(arguments.seconds * steps_per_s))
    floors: list[Sample] = []
    servers: list[Sample] = []
    for _ in range(arguments.repeats):
        servers.append(bench.run_server(streams=streams, steps=steps, step_s=1 / steps_per_s))
        event_bytes = servers[-1].event_bytes
        floors.append(bench.run_floor(streams=streams, steps=steps, step_s=1 / steps_per_s, event_bytes=event_bytes))
        print(
            f"  {streams} streams: {servers[-1].cpu_s_per_100k:.3f} / {floors[-1].cpu_s_per_100k:.3f}", file=sys.stderr
        )
    floor = statistics.median(sample.cpu_s_per_100k for sample in floors)
    server = statistics.median(sample.cpu_s_per_100k for sample in servers)
    return {
        "streams": streams,
        "steps_per_s": steps_per_s,
        "event_bytes": servers[-1].event_bytes,
        "floor_cpu_s_per_100k": floor,
        "server_cpu_s_per_100k": server,
        "ratio": statistics.median(s.cpu_s_per_100k / f.cpu_s_per_100k for s, f in zip(servers, floors, strict=True)),
        "server_tokens_per_s": statistics.median(sample.tokens_per_s for sample in servers),
        "lag_p50_ms": statistics.median(sample.lag_p50_ms for sample in servers),
        "lag_p99_ms": statistics.median(sample.lag_p99_ms for sample in servers),
        "server_samples": [sample.asdict() for sample in servers],
        "floor_samples": [sample.asdict() for sample in floors],
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="openinfer bench frontend", description=__doc__, allow_abbrev=False)
    parser.add_argument("--streams", type=int, nargs="+", default=[8, 64, 256], metavar="N")
    parser.add_argument("--rate", type=float, default=RATE_TOKENS_PER_S, metavar="X", help="tokens/s over all streams")
    parser.add_argument("--seconds", type=float, default=6.0, metavar="X", help="length of one run")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="runs of each, in turns; medians are shown")
    parser.add_argument("--json", metavar="FILE", help="write all samples to FILE")
    return parser


def _compile(name: str, folder: str) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or not sys.platform.startswith("linux"):
        raise Refused("the frontend benchmark needs Linux and a C compiler (cc) for its floor and its client")
    target = Path(folder) / name
    subprocess.run([compiler, "-O2", "-o", str(target), str(_HERE / f"{name}.c")], check=True)  # noqa: S603
    return target


def _set_up(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "event_loop": "asyncio" if find_spec("uvloop") is None else "uvloop",
        "machine": platform.machine(),
        "kernel": platform.release(),
        "rate_tokens_per_s": arguments.rate,
        "seconds": arguments.seconds,
        "repeats": arguments.repeats,
    }


def _table(rows: Sequence[dict[str, Any]]) -> str:
    head = f"{'streams':>8} {'floor':>8} {'server':>8} {'ratio':>7} {'tokens/s':>10} {'lag p50 ms':>11} {'p99 ms':>8}"
    return "\n".join(["CPU-seconds per 100k tokens, median of runs in turns", head, *map(_line, rows)])


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['streams']:>8} {row['floor_cpu_s_per_100k']:>8.3f} {row['server_cpu_s_per_100k']:>8.3f} "
        f"{row['ratio']:>7.2f} {row['server_tokens_per_s']:>10,.0f} "
        f"{row['lag_p50_ms']:>11.1f} {row['lag_p99_ms']:>8.1f}"
    )
