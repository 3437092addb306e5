"""`openinfer bench frontend`: what the HTTP frontend costs per streamed token, against the floor.

The floor is a C program that calls `send()` once per token and does nothing else. Floor and server take turns in
one run, with the same number of streams, steps and bytes per event, before the same C client; the figure is the
CPU time of the streaming process (user and system) per 100,000 tokens, the server's over the floor's. The server
runs before a simulated engine in a process of its own, whose tokens carry the time they were made, from which the
client tells the lag of every token. Absolute figures of different machines do not compare; the ratio does. Where
`perf` can count instructions, so do those, also while others use the machine.
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

from openinfer_bench.frontend.answers import ANSWERS
from openinfer_bench.frontend.duties import DUTIES, duties
from openinfer_bench.frontend.measure import Bench, Sample
from openinfer_core import Refused

OPENINFER_CONTRACT = 1

RATE_TOKENS_PER_S = 16_000
_HERE = Path(__file__).resolve().parent


def run(argv: Sequence[str]) -> int:
    """Measures and prints a table; `--json FILE` also writes every sample."""
    arguments = _parser().parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="openinfer-bench-") as folder:
        floor, client = _compile("floor", folder), _compile("client", folder)
        with duties(arguments.duties, Path(folder)) as asked:
            bench = Bench(Path(folder), floor=floor, client=client, duties=asked)
            rows = [row for streams in arguments.streams for row in _measure(bench, arguments, streams)]
    print(_table(rows))
    if arguments.json is not None:
        report = {"set_up": _set_up(arguments), "rows": rows}
        Path(arguments.json).write_text(json.dumps(report, indent=2) + "\n")
    return 0


def _measure(bench: Bench, arguments: argparse.Namespace, streams: int) -> list[dict[str, Any]]:
    """Floor and server in turns, for every kind of answer; medians, and the runs behind them."""
    steps_per_s = arguments.rate / streams
    steps = max(1, round(arguments.seconds * steps_per_s))
    floors: dict[str, list[Sample]] = {name: [] for name in arguments.answers}
    servers: dict[str, list[Sample]] = {name: [] for name in arguments.answers}
    for _ in range(arguments.repeats):
        for name in arguments.answers:
            server = bench.run_server(ANSWERS[name], streams=streams, steps=steps, step_s=1 / steps_per_s)
            size = server.event_bytes
            floor = bench.run_floor(streams=streams, steps=steps, step_s=1 / steps_per_s, event_bytes=size)
            servers[name].append(server)
            floors[name].append(floor)
            print(
                f"  {streams} streams, {name}: {server.cpu_s_per_100k:.3f} / {floor.cpu_s_per_100k:.3f}",
                file=sys.stderr,
            )
    return [_row(name, streams, steps_per_s, servers[name], floors[name]) for name in arguments.answers]


def _row(name: str, streams: int, steps_per_s: float, servers: list[Sample], floors: list[Sample]) -> dict[str, Any]:
    return {
        "answer": name,
        "streams": streams,
        "steps_per_s": steps_per_s,
        "event_bytes": servers[-1].event_bytes,
        "floor_cpu_s_per_100k": statistics.median(sample.cpu_s_per_100k for sample in floors),
        "server_cpu_s_per_100k": statistics.median(sample.cpu_s_per_100k for sample in servers),
        "ratio": statistics.median(s.cpu_s_per_100k / f.cpu_s_per_100k for s, f in zip(servers, floors, strict=True)),
        "server_instructions_per_token": _median([sample.instructions_per_token for sample in servers]),
        "server_tokens_per_s": statistics.median(sample.tokens_per_s for sample in servers),
        "lag_p50_ms": statistics.median(sample.lag_p50_ms for sample in servers),
        "lag_p99_ms": statistics.median(sample.lag_p99_ms for sample in servers),
        "server_samples": [sample.asdict() for sample in servers],
        "floor_samples": [sample.asdict() for sample in floors],
    }


def _median(counts: Sequence[int | None]) -> float | None:
    known = [count for count in counts if count is not None]
    return statistics.median(known) if known else None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="openinfer bench frontend", description=__doc__, allow_abbrev=False)
    parser.add_argument("--streams", type=int, nargs="+", default=[8, 64, 256], metavar="N", help="streams at a time")
    about = "; ".join(f"{answer.name}: {answer.about}" for answer in ANSWERS.values())
    parser.add_argument("--answers", nargs="+", choices=[*ANSWERS], default=["text"], metavar="NAME", help=about)
    also = "what the server does besides: " + "; ".join(f"{name}: {text}" for name, text in DUTIES.items())
    parser.add_argument("--with", dest="duties", nargs="+", choices=[*DUTIES], default=[], metavar="NAME", help=also)
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
        "with": arguments.duties,
        "repeats": arguments.repeats,
    }


def _table(rows: Sequence[dict[str, Any]]) -> str:
    head = ("answer", "streams", "floor", "server", "ratio", "instr/tok", "tokens/s", "lag p50 ms", "p99 ms")
    return "\n".join(["CPU-seconds per 100k tokens, median of runs in turns", _line(head), *map(_cells, rows)])


def _cells(row: dict[str, Any]) -> str:
    return _line(
        (
            row["answer"],
            row["streams"],
            f"{row['floor_cpu_s_per_100k']:.3f}",
            f"{row['server_cpu_s_per_100k']:.3f}",
            f"{row['ratio']:.2f}",
            row["server_instructions_per_token"] or "-",
            f"{row['server_tokens_per_s']:,.0f}",
            f"{row['lag_p50_ms']:.1f}",
            f"{row['lag_p99_ms']:.1f}",
        )
    )


def _line(cells: Sequence[object]) -> str:
    return " ".join(f"{cell!s:>10}" for cell in cells)
