"""`openinfer bench scheduler`: host time of planning a step and of bookkeeping for a KV block; no device is needed."""

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openinfer_bench.guard_timing import measure_guard
from openinfer_bench.scheduler_timing import measure_scheduler
from openinfer_kv_cache.testing import measure_bookkeeping

OPENINFER_CONTRACT = 1


def run(argv: Sequence[str]) -> int:
    """Measures and prints a table; `--json FILE` also writes it."""
    arguments = _parser().parse_args(argv)
    steps = [measure_scheduler(rows=rows, steps=arguments.steps, windows=arguments.windows) for rows in arguments.rows]
    guards = [measure_guard(rows=rows, steps=arguments.steps, windows=arguments.windows) for rows in arguments.rows]
    blocks = measure_bookkeeping()
    lines = [f"{'decode rows':>12} {'plan us':>9} {'apply us':>9} {'us/row':>8} {'worst step us':>14}"]
    lines += [
        f"{timing.rows:>12} {timing.plan_s * 1e6:>9.0f} {timing.apply_s * 1e6:>9.0f} "
        f"{timing.row_s * 1e6:>8.2f} {timing.worst_step_s * 1e6:>14.0f}"
        for timing in steps
    ]
    lines += ["", f"{'decode rows':>12} {'guard us':>9} {'plan check us':>14} {'reconcile us':>13}"]
    lines += [
        f"{guard.rows:>12} {guard.calls_s * 1e6:>9.2f} {guard.plan_check_s * 1e6:>14.1f} "
        f"{guard.reconcile_s * 1e6:>13.1f}"
        for guard in guards
    ]
    lines.append(f"block bookkeeping (match + reserve + seal + release): {blocks.total_s * 1e6:.2f} us per block")
    sys.stdout.write("\n".join(lines) + "\n")
    if arguments.json is not None:
        report: dict[str, Any] = {
            "set_up": {
                "python": platform.python_version(),
                "machine": platform.machine(),
                "kernel": platform.release(),
                "steps": arguments.steps,
                "windows": arguments.windows,
            },
            "scheduler": [
                {
                    "rows": timing.rows,
                    "plan_us": timing.plan_s * 1e6,
                    "apply_us": timing.apply_s * 1e6,
                    "us_per_row": timing.row_s * 1e6,
                    "median_step_us": timing.median_step_s * 1e6,
                    "worst_step_us": timing.worst_step_s * 1e6,
                }
                for timing in steps
            ],
            "guard": [
                {
                    "rows": guard.rows,
                    "calls_us": guard.calls_s * 1e6,
                    "plan_check_us": guard.plan_check_s * 1e6,
                    "reconcile_us": guard.reconcile_s * 1e6,
                }
                for guard in guards
            ],
            "bookkeeping_us_per_block": blocks.total_s * 1e6,
        }
        Path(arguments.json).write_text(json.dumps(report, indent=2) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="openinfer bench scheduler", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[1, 16, 64, 256], metavar="N", help="sequences that decode"
    )
    parser.add_argument("--steps", type=int, default=400, metavar="N", help="steps to time")
    parser.add_argument(
        "--windows", type=int, nargs="+", default=[], metavar="N", help="windows of further block tables, in tokens"
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures to FILE")
    return parser
