"""`openinfer simulate`: the whole stack in virtual time, with faults; one seed, one run.

Scheduler, pool, tiers, loop, ledger, HTTP server and tokenizer are those that serve. The GPU, sockets, threads, clocks
and entropy are the world's (`openinfer_core.testing.simulation`). What a client gets is compared with what the fake
model must say, and what the engine keeps after all have been answered with nothing.
"""

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from openinfer_core.testing.simulation.child import run_in_child

OPENINFER_CONTRACT = 1

SCENARIO = "openinfer_bench.simulate.scenario:main"


def run(argv: Sequence[str]) -> int:
    """Runs as many simulations as there are seeds; 1 if one of them finds something wrong."""
    if argv[:1] == ["replay"]:
        from openinfer_bench.simulate.replay import command

        return command.run(argv[1:])
    if argv[:1] == ["fit"] and {"--offline", "--host-only", "--help", "-h"} & {*argv}:  # the help is of both
        from openinfer_bench.simulate.replay import fitted

        return fitted.run(argv[1:])
    if argv[:1] == ["fit"]:
        from openinfer_bench.simulate import fit  # loads llguidance, which no simulation needs

        return fit.run(argv[1:])
    arguments = _parser().parse_args(argv)
    seeds = range(arguments.seed, arguments.seed + arguments.seeds)
    options = {
        "hours": arguments.hours,
        "faults_per_hour": arguments.faults_per_hour,
        "tiers": not arguments.no_tiers,
    }
    with ThreadPoolExecutor(arguments.processes) as threads:
        codes = threads.map(_run_seed, seeds, itertools.repeat(options))
    return max(codes, default=0)


def simulate(seed: int, options: dict[str, Any], *, hash_seed: int | None = None) -> tuple[int, str]:
    """Runs one simulation in a process of its own; returns its exit status and its output, the report last."""
    with tempfile.TemporaryDirectory(prefix="openinfer-simulation-") as folder:  # one that fails leaves its files
        process = run_in_child(SCENARIO, seed=seed, arguments=options, hash_seed=hash_seed, folder=Path(folder))
        output, _ = process.communicate()
    return process.returncode, output


def _run_seed(seed: int, options: dict[str, Any]) -> int:
    began_s = time.monotonic()
    code, output = simulate(seed, options)
    took_s = time.monotonic() - began_s
    if code:
        sys.stdout.write(f"{output}\nseed {seed}: failed after {took_s:.1f} s\n")
        return 1
    report = json.loads(output.splitlines()[-1])
    sys.stdout.write(f"{json.dumps(report)}\nseed {seed}: well, {took_s:.1f} s\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="openinfer simulate", description=__doc__, allow_abbrev=False)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="the first seed")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="how many seeds, one after the other")
    parser.add_argument("--hours", type=float, default=1.0, metavar="H", help="virtual hours of each")
    parser.add_argument("--faults-per-hour", type=float, default=110.0, metavar="N", help="faults of the machine")
    parser.add_argument("--no-tiers", action="store_true", help="without KV tiers")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="simulations at the same time")
    return parser
