"""`openinfer bench hostile`: what a tenant sees while another one attacks, and what the attacker gets.

For each attack (--attack) a server is started with `ulimit -n 256`, keys of two tenants and real grammars, and the
victims' requests are measured three times, A-B-A: B during the attack, A next to an honest tenant with as many requests
in flight as the attacker was admitted in a trial. A row fails if a victim's p99 of the time to first token, or of the
gaps between tokens, is more than twice that of A and more than 20 ms more; if a victim is answered other than 200,
which none in A was; if an arm has too few requests or gaps; if `/health` takes longer than a second; if memory exceeds
what the server had when idle and its budgets, or 1 GiB; if the server logs more than 1 MiB during the attack; if an
attacker gets what is not foreseen; or if the server ends.

With --processors each attack has processors of its own, and as many attacks are measured at a time as these allow.

--server-command measures another installation, such as an older commit's.
"""

import argparse
import asyncio
import json
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import msgspec

from openinfer_bench.hostile.arms import FULL, QUICK, Row, Size, measure
from openinfer_bench.hostile.attacks import ATTACKS
from openinfer_bench.hostile.lanes import in_lanes
from openinfer_bench.served import OPENINFER
from openinfer_core.errors import OpenInferError
from openinfer_core.process.processors import usable_processors
from openinfer_core.provenance import provenance

OPENINFER_CONTRACT = 1

_WIDTHS = (14, 9, 17, 15, 9, 13, 7, 0)


def run(argv: Sequence[str]) -> int:
    """Measures and prints a table; `--json FILE` also writes it. Returns 1 if a row failed."""
    arguments = _parser().parse_args(argv)
    size, command = (QUICK if arguments.quick else FULL), shlex.split(arguments.server_command)
    print(
        _line(("attack", "admitted", "TTFT p99 ms", "ITL p99 ms", "health", "MiB, at most", "log KiB", "verdict")),
        flush=True,
    )
    rows: list[Row] = []
    begin_s = time.monotonic()
    for row in _rows(arguments.attack, size, command, arguments.processors):
        rows.append(row)
        print(_cells(row), flush=True)
        if arguments.json is not None:  # after each row: the whole takes long
            _write(Path(arguments.json), rows, size, arguments)
    failed = [row.attack for row in rows if row.failures]
    failed += [name for name in arguments.attack if name not in {row.attack for row in rows}]
    print(f"{len(rows)} attacks, {time.monotonic() - begin_s:.0f} s, {size.about}: ", end="")
    print(f"failed: {', '.join(failed)}" if failed else "passed")
    return 1 if failed else 0


def _rows(names: Sequence[str], size: Size, command: Sequence[str], processors: int) -> Iterator[Row]:
    """Of each attack as it ends; one whose server does not start has none, and a line on standard error."""
    for name, measured in in_lanes(partial(_measure, size, command), names, processors=processors):
        try:
            yield measured()
        except OpenInferError as error:
            print(f"{name}: {error}", file=sys.stderr, flush=True)


def _measure(size: Size, command: Sequence[str], name: str) -> Row:
    return asyncio.run(measure(name, size, command))


def _write(file: Path, rows: Sequence[Row], size: Size, arguments: argparse.Namespace) -> None:
    machine = {"usable_processors": usable_processors(), "processors_of_an_attack": arguments.processors or None}
    set_up = {**asdict(size), **machine, "server_command": arguments.server_command}
    report = {**msgspec.to_builtins(provenance()), "set_up": set_up, "rows": [asdict(row) for row in rows]}
    file.write_text(json.dumps(report, indent=2) + "\n")


def _cells(row: Row) -> str:
    cells = (
        row.attack,
        f"{row.admitted:.1f}",
        f"{row.ttft_p99_ms:.0f} ({row.ttft_p99_honest_ms:.0f})",
        f"{row.itl_p99_ms:.0f} ({row.itl_p99_honest_ms:.0f})",
        f"{row.health_s:.2f} s",
        f"{row.peak_mib:.0f} ({row.allowed_mib:.0f})",
        f"{row.log_kib:.1f}",
        "; ".join(row.failures) or "passed",
    )
    return _line(cells)


def _line(cells: Sequence[str]) -> str:
    return " ".join(f"{cell:>{width}}" for cell, width in zip(cells, _WIDTHS, strict=True))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="openinfer bench hostile", description=__doc__, allow_abbrev=False)
    about = "; ".join(f"{name}: {attack.about}" for name, attack in ATTACKS.items())
    parser.add_argument("--attack", nargs="+", choices=[*ATTACKS], default=[*ATTACKS], metavar="NAME", help=about)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK.about}; without it, {FULL.about}")
    parser.add_argument(
        "--server-command", default=shlex.join(OPENINFER), metavar="COMMAND", help="of another installation"
    )
    parser.add_argument(
        "--processors", type=int, default=0, metavar="N", help="of one attack; by default all, one attack at a time"
    )
    parser.add_argument("--json", metavar="FILE", help="write the rows to FILE")
    return parser


if __name__ == "__main__":
    raise SystemExit(run(sys.argv[1:]))
