"""`openinfer bench hostile`: what a tenant sees while another one attacks, and what the attacker gets.

For each attack (--attack) a server is started with `ulimit -n 256`, keys of two tenants and real grammars, and the
victims' requests are measured three times, A-B-A: B during the attack, A next to an honest tenant with as many requests
in flight as the attacker was admitted in a trial. A row fails if a victim's p99 of the time to first token, or of the
gaps between tokens, is more than twice that of A and more than 20 ms more; if a victim is answered other than 200,
which none in A was; if `/health` takes longer than a second and than twice what it took in A; if memory exceeds what
the server had when idle and its budgets, or 1 GiB; if an attacker gets what is not foreseen; or if the server ends.

--server-command measures another installation, such as an older commit's.
"""

import argparse
import asyncio
import json
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import msgspec

from openinfer_bench.hostile.arms import FULL, QUICK, Row, Size, measure
from openinfer_bench.hostile.attacks import ATTACKS
from openinfer_bench.served import OPENINFER
from openinfer_core.provenance import provenance

OPENINFER_CONTRACT = 1

_WIDTHS = (14, 9, 17, 15, 9, 13, 0)


def run(argv: Sequence[str]) -> int:
    """Measures and prints a table; `--json FILE` also writes it. Returns 1 if a row failed."""
    arguments = _parser().parse_args(argv)
    size, command = (QUICK if arguments.quick else FULL), shlex.split(arguments.server_command)
    print(_line(("attack", "admitted", "TTFT p99 ms", "ITL p99 ms", "health", "MiB, at most", "verdict")), flush=True)
    rows: list[Row] = []
    begin_s = time.monotonic()
    for name in arguments.attack:
        row = asyncio.run(measure(name, size, command))
        rows.append(row)
        print(_cells(row), flush=True)
        if arguments.json is not None:  # after each row: the whole takes long
            _write(Path(arguments.json), rows, size, arguments.server_command)
    failed = [row.attack for row in rows if row.failures]
    print(f"{len(rows)} attacks, {time.monotonic() - begin_s:.0f} s, {size.about}: ", end="")
    print(f"failed: {', '.join(failed)}" if failed else "passed")
    return 1 if failed else 0


def _write(file: Path, rows: Sequence[Row], size: Size, server_command: str) -> None:
    set_up = {**asdict(size), "server_command": server_command}
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
    parser.add_argument("--json", metavar="FILE", help="write the rows to FILE")
    return parser


if __name__ == "__main__":
    raise SystemExit(run(sys.argv[1:]))
