"""`openinfer simulate replay`: a real server's load, in virtual time, with fitted times.

    --fit FIT --measured FILE   every workload of a result of `openinfer bench serve`, beside what was measured
    --fit FIT --arrivals FILE   requests at the times of an arrival trace: a step trace, Mooncake's or Azure's
    --steps FILE                a step trace, call by call on its scheduler; the first step that differs is named
                                (with --fit: what each step should have taken, beside what it took)

Returns 1 where a figure is beyond its bound, or a step differs.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from openinfer_bench.simulate.replay.comparison import MeasuredRow, compare, name_of, read_measured, table
from openinfer_bench.simulate.replay.fitted import FittedServer, read_fitted
from openinfer_bench.simulate.replay.step_times import compare_step_times
from openinfer_bench.simulate.replay.steps import replay_steps
from openinfer_core import EngineClosed, InvalidRequest
from openinfer_core.provenance import provenance
from openinfer_core.testing.simulation.child import run_in_child

_SERVED = "openinfer_bench.simulate.replay.served:main"
_NUM_TOKEN_IDS, _SECONDS = 151_000, 20.0


def run(argv: Sequence[str]) -> int:
    """Replays, prints a table, and with `--json` writes it."""
    arguments = _parser().parse_args(argv)
    asked = [name for name in ("measured", "arrivals", "steps") if getattr(arguments, name) is not None]
    if len(asked) != 1:
        raise InvalidRequest("give one of --measured, --arrivals and --steps", field="replay")
    if asked != ["steps"] and arguments.fit is None:
        raise InvalidRequest(f"--{asked[0]} needs --fit, what `simulate fit --offline` wrote", field="fit")
    fitted = None if arguments.fit is None else read_fitted(Path(arguments.fit))
    code, report = {"measured": _measured, "arrivals": _arrivals, "steps": _steps}[asked[0]](arguments, fitted)
    if arguments.json is not None:
        told = {"commit": provenance().commit, "fit": arguments.fit and Path(arguments.fit).name, **report}
        Path(arguments.json).write_text(json.dumps(told, indent=2) + "\n")
    return code


def replay(seed: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """One run in a process of its own; see `served.main` for the arguments."""
    process = run_in_child(_SERVED, seed=seed, arguments=arguments)
    output, _ = process.communicate()
    if process.returncode:
        raise EngineClosed(f"the replay of {arguments} failed:\n{output}")
    return json.loads(output.splitlines()[-1])


def _measured(arguments: argparse.Namespace, fitted: FittedServer | None) -> tuple[int, dict[str, Any]]:
    del fitted
    measured = read_measured(Path(arguments.measured))
    seconds = measured.set_up.get("seconds", _SECONDS)
    # Warm and cold rows are of one workload.
    rows = [row for row in measured.rows if not row.workload.startswith("warm=")]
    runs: list[dict[str, Any]] = [
        {
            "fit": arguments.fit,
            "workload": row.workload.replace("cold=", "warm="),
            "sizes": {
                "prompt_tokens": row.prompt_tokens,
                "output_tokens": row.output_tokens,
                "seconds": seconds,
                "num_token_ids": measured.set_up.get("num_token_ids", _NUM_TOKEN_IDS),
                "seed": measured.set_up.get("seed", 42) if row.seed is None else row.seed,
            },
        }
        for row in rows
    ]
    with ThreadPoolExecutor(arguments.processes) as threads:
        reports = list(threads.map(replay, itertools.repeat(arguments.seed), runs))
    replayed = {name_of(row): row for report in reports for row in report["rows"]}
    found = [each for row in measured.rows for each in compare(row, replayed[_name_of(row)])]
    sys.stdout.write(table(found))
    return int(not all(each.passed for each in found)), {
        "measured": {"file": Path(arguments.measured).name, "commit": measured.commit, "gpu": measured.gpu},
        "compared": msgspec.to_builtins(found),
        "runs": reports,
    }


def _name_of(row: MeasuredRow) -> str:
    return name_of(msgspec.to_builtins(row))


def _arrivals(arguments: argparse.Namespace, fitted: FittedServer | None) -> tuple[int, dict[str, Any]]:
    del fitted
    options = {"fit": arguments.fit, "arrivals": arguments.arrivals, "most_requests": arguments.most_requests}
    report = replay(arguments.seed, options)
    sys.stdout.write(json.dumps(report, indent=2) + "\n")
    return int(any(row["failed"] for row in report["rows"])), report


def _steps(arguments: argparse.Namespace, fitted: FittedServer | None) -> tuple[int, dict[str, Any]]:
    path = Path(arguments.steps)
    result = replay_steps(path)
    sys.stdout.write(f"{result}\n")
    report: dict[str, Any] = {"steps": msgspec.to_builtins(result)}
    if fitted is not None:
        times = compare_step_times(path, fitted.steps)
        sys.stdout.write("".join(f"{each}\n" for each in times))
        report["step_times"] = msgspec.to_builtins(times)
    return int(result.difference is not None), report


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="openinfer simulate replay",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--fit", metavar="FIT", help="what `simulate fit --offline` wrote")
    add("--measured", metavar="FILE", help="a result of bench serve, whose workloads are run")
    add("--arrivals", metavar="FILE", help="an arrival trace")
    add("--most-requests", type=int, metavar="N", help="of an arrival trace: the first so many")
    add("--steps", metavar="FILE", help="a step trace, which --step-trace wrote")
    add("--seed", type=int, default=0, metavar="N", help="of the world: what is cut, and in which order threads run")
    add("--processes", type=int, default=2, metavar="N", help="workloads at the same time")
    add("--json", metavar="FILE", help="write what was found to FILE")
    return parser
