"""`openinfer bench startup`: how long a server takes until it serves, phase by phase, and the memory it then holds.

Starts `openinfer serve` with the flags that follow, several times; the phases are what the server's processes measured
themselves (`openinfer serve --start-report`). The figures are those of the run whose time is the median.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from openinfer.start_report import StartReport
from openinfer_bench.processes import TreeMemory, tree_memory
from openinfer_bench.served import served
from openinfer_core.provenance import provenance

OPENINFER_CONTRACT = 1

_SETTLE_S = 1.0
"""Between ready and the look at memory."""
_GIGA, _MIB = 1e9, 2**20


def run(argv: Sequence[str]) -> int:
    """Measures and prints a table; `--json FILE` also writes it. Other flags are the server's."""
    arguments, flags = _parser().parse_known_args(argv)
    runs = [_start(flags, keep=arguments.keep) for _ in range(arguments.repeats)]
    result = _result(sorted(runs, key=lambda each: each["ready_s"])[len(runs) // 2], runs)
    print(_table(result))
    if arguments.json is not None:
        made_of = msgspec.to_builtins(provenance(commit=arguments.commit))
        text = msgspec.json.format(msgspec.json.encode(made_of | {"flags": flags} | result))
        Path(arguments.json).write_bytes(text + b"\n")
    return 0


def _start(flags: Sequence[str], *, keep: float) -> dict[str, Any]:
    with served(flags) as server:
        time.sleep(keep)
        memory: TreeMemory = tree_memory(server.pid)
        report: StartReport = server.report
    return msgspec.to_builtins(report) | {
        "ready_s": round(server.ready_s, 3),
        "own_ready_s": report.ready_s,
        "resident_mb": memory.resident_mib,
        "proportional_mb": memory.proportional_mib,
        "processes": memory.processes,
    }


def _result(middle: dict[str, Any], runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The median run, with the figures that follow from it, and what all runs took."""
    device_mib = max(phase["device_mib"] for phase in middle["phases"])
    ledger_mib = sum(middle["memory_bytes"].values()) / _MIB
    weights_s = next((phase["seconds"] for phase in middle["phases"] if phase["name"] == "weights"), 0.0)
    weights_bytes = middle["memory_bytes"].get("weights", 0)
    return middle | {
        "weights_gb_per_s": round(weights_bytes / _GIGA / weights_s, 1) if weights_s else None,
        "device_mb": device_mib,
        "ledger_mb": round(ledger_mib, 1),
        "all_ready_s": [each["ready_s"] for each in runs],
        "all_resident_mb": [each["resident_mb"] for each in runs],
    }


def _table(result: dict[str, Any]) -> str:
    lines = [f"{'process':>10} {'phase':>12} {'begins s':>9} {'takes s':>8} {'resident MiB':>13} {'device MiB':>11}"]
    lines += [
        f"{phase['process']:>10} {phase['name']:>12} {phase['begin_s']:>9.2f} {phase['seconds']:>8.2f} "
        f"{phase['resident_mib']:>13.0f} {phase['device_mib']:>11.0f}"
        for phase in result["phases"]
    ]
    every = ", ".join(f"{each:.2f}" for each in result["all_ready_s"])
    lines.append(
        f"ready after {result['ready_s']:.2f} s (all runs: {every}); "
        f"{result['resident_mb']:.0f} MiB resident in {result['processes']} processes, "
        f"{result['proportional_mb']:.0f} with shared pages counted once"
    )
    if result["weights_gb_per_s"]:
        lines.append(f"weights at {result['weights_gb_per_s']:.1f} GB/s")
    if result["device_mb"]:
        share, ledger_mb = result["device_mb"] / result["ledger_mb"], result["ledger_mb"]
        lines.append(f"device memory {result['device_mb']:,.0f} MiB, {share:.1%} of the ledger's {ledger_mb:,.0f}")
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="openinfer bench startup",
        description=__doc__,
        epilog="All other flags are those of openinfer serve: --model DIR --device cuda --load-format dummy",
        allow_abbrev=False,
    )
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="number of starts; the median is shown")
    parser.add_argument(
        "--keep", type=float, default=_SETTLE_S, metavar="S", help="seconds from ready to the reading of memory"
    )
    parser.add_argument("--commit", metavar="ID", help="commit to record, where the code is in no checkout")
    parser.add_argument("--json", metavar="FILE", help="write the figures to FILE")
    return parser
