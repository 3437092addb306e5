"""`openinfer bench hostile`: what good requests see while others attack, and what the attackers get.

A server in a process of its own, before a simulated engine, answers good streams; then each attack (--attacks) runs
beside them, from a third process. Each row has the good requests' time to first token over the one without attacks,
measured before it, the server's memory, and how often each outcome came. A row fails if an attacker gets what is
not foreseen, or the server ends.

The last row is about long prompts instead of attacks: streams run while prompts of some 16,000 tokens are encoded, and
it tells by how much longer the longest gaps between their tokens become.
"""

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from openinfer_bench.hostile.attacks import ATTACKS
from openinfer_bench.hostile.good import Seen, ask, keep_asking, percentile
from openinfer_bench.hostile.model import write_model
from openinfer_core.errors import Refused
from openinfer_core.provenance import provenance

OPENINFER_CONTRACT = 1

GOOD_CLIENTS = 8
STREAMS = 64
LONG_PROMPT = "word after word, number 1234567890 " * 1600
"""Some 16,000 tokens of the benchmark's tokenizer."""
COUNTS = {"flood": 5000, "disconnects": 5000}
CONCURRENCY = {"slow-heads": 400, "flood": 400, "disconnects": 50}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One attack."""

    attack: str
    about: str
    attempts: int
    outcomes: dict[str, int]
    unforeseen: dict[str, int]
    good_requests: int
    good_refusals: int
    """Of good requests, which were asked again."""
    ttft_p50_ms: float
    ttft_p50_alone_ms: float
    """Just before, without the attack."""
    ttft_p95_ms: float
    ttft_p95_alone_ms: float
    resident_mib: float
    """The server's memory after it; the engine's is not in it."""

    @property
    def ratio(self) -> float:
        """Of the medians of the time to first token."""
        return self.ttft_p50_ms / self.ttft_p50_alone_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class LongPrompts:
    """Gaps between tokens of streams, alone and while long prompts are encoded."""

    streams: int
    long_prompts: int
    gap_p99_alone_ms: float
    gap_p99_ms: float
    gap_max_alone_ms: float
    gap_max_ms: float


def run(argv: Sequence[str]) -> int:
    """Measures and prints a table; `--json FILE` also writes it. Returns 1 if an attack had an unforeseen outcome."""
    arguments = _parser().parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="openinfer-bench-") as folder:
        write_model(Path(folder))
        with _server(folder) as (server, host, port):
            rows = [_measure(name, server.pid, host, port, arguments.seconds) for name in arguments.attacks]
            long_prompts = asyncio.run(_long_prompts(host, port, arguments.seconds))
            if server.poll() is not None:
                raise Refused(f"the server ended with {server.returncode}")
    print(_table(rows, long_prompts))
    if arguments.json is not None:
        report = {
            **msgspec.to_builtins(provenance()),
            "set_up": {"seconds": arguments.seconds, "good_clients": GOOD_CLIENTS},
            "rows": [{**asdict(row), "ratio": row.ratio} for row in rows],
            "long_prompts": asdict(long_prompts),
        }
        Path(arguments.json).write_text(json.dumps(report, indent=2) + "\n")
    return 1 if any(row.unforeseen for row in rows) else 0


def _measure(name: str, pid: int, host: str, port: int, seconds: float) -> Row:
    def good(for_s: float) -> Seen:
        return asyncio.run(keep_asking(host, port, clients=GOOD_CLIENTS, seconds=for_s))

    alone = good(seconds)
    count, concurrency = COUNTS.get(name, 1_000_000), CONCURRENCY.get(name, 8)
    arguments = [name, host, str(port), str(count), str(concurrency), str(seconds)]
    command = [sys.executable, "-m", "openinfer_bench.hostile.attacker", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as attacker:  # noqa: S603 - our own module
        during = good(seconds)
        told, _ = attacker.communicate()
    outcomes: dict[str, int] = json.loads(told)
    attack = ATTACKS[name]
    return Row(
        attack=name,
        about=attack.about,
        attempts=sum(outcomes.values()),
        outcomes=outcomes,
        unforeseen={outcome: times for outcome, times in outcomes.items() if outcome not in attack.outcomes},
        good_requests=len(during.ttft_s),
        good_refusals=during.refusals,
        ttft_p50_ms=1e3 * percentile(during.ttft_s, 0.5),
        ttft_p50_alone_ms=1e3 * percentile(alone.ttft_s, 0.5),
        ttft_p95_ms=1e3 * percentile(during.ttft_s, 0.95),
        ttft_p95_alone_ms=1e3 * percentile(alone.ttft_s, 0.95),
        resident_mib=_resident_mib(pid),
    )


async def _long_prompts(host: str, port: int, seconds: float) -> LongPrompts:
    tokens = max(2, int(seconds * 100))
    alone = await _gaps(host, port, tokens)
    long_seen = Seen()

    async def ask_long() -> None:
        while True:
            await ask(host, port, long_seen, prompt=LONG_PROMPT, max_tokens=1)

    asking = [asyncio.create_task(ask_long()) for _ in range(2)]
    during = await _gaps(host, port, tokens)
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    return LongPrompts(
        streams=STREAMS,
        long_prompts=len(long_seen.ttft_s),
        gap_p99_alone_ms=1e3 * percentile(alone.gaps_s, 0.99),
        gap_p99_ms=1e3 * percentile(during.gaps_s, 0.99),
        gap_max_alone_ms=1e3 * percentile(alone.gaps_s, 1.0),
        gap_max_ms=1e3 * percentile(during.gaps_s, 1.0),
    )


async def _gaps(host: str, port: int, tokens: int) -> Seen:
    seen = Seen()
    await asyncio.gather(*(ask(host, port, seen, max_tokens=tokens) for _ in range(STREAMS)))
    return seen


@contextlib.contextmanager
def _server(folder: str) -> Generator[tuple["subprocess.Popen[str]", str, int]]:
    command = [sys.executable, "-m", "openinfer_bench.hostile.server", folder]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:  # noqa: S603 - our own module
        try:
            url = server.stdout.readline() if server.stdout is not None else ""
            if not url:
                raise Refused("the benchmark's server did not start; its log says why")
            host, _, port = url.strip().removeprefix("http://").rpartition(":")
            yield server, host, int(port)
        finally:
            server.terminate()


def _resident_mib(pid: int) -> float:
    """0 where the system does not say."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return 0.0
    return pages * 4096 / 2**20


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="openinfer bench hostile", description=__doc__, allow_abbrev=False)
    about = "; ".join(f"{name}: {attack.about}" for name, attack in ATTACKS.items())
    parser.add_argument("--attacks", nargs="+", choices=[*ATTACKS], default=[*ATTACKS], metavar="NAME", help=about)
    parser.add_argument("--seconds", type=float, default=4.0, metavar="X", help="how long each attack lasts")
    parser.add_argument("--json", metavar="FILE", help="write the rows to FILE")
    return parser


def _table(rows: Sequence[Row], long_prompts: LongPrompts) -> str:
    head = ("attack", "attempts", "good", "asked again", "TTFT p50 ms", "x alone", "p95 ms", "alone", "RSS MiB")
    lines = [_line((*head, "outcomes")), *map(_cells, rows)]
    told = long_prompts
    lines.append(
        f"{told.streams} streams, {told.long_prompts} prompts of 16k tokens: gap p99 {told.gap_p99_ms:.1f} ms "
        f"(alone {told.gap_p99_alone_ms:.1f}), longest {told.gap_max_ms:.1f} ms (alone {told.gap_max_alone_ms:.1f})"
    )
    return "\n".join(lines)


def _cells(row: Row) -> str:
    outcomes = " ".join(f"{outcome}:{times}" for outcome, times in sorted(row.outcomes.items()))
    cells = (
        row.attack,
        row.attempts,
        row.good_requests,
        row.good_refusals,
        f"{row.ttft_p50_ms:.1f}",
        f"{row.ratio:.2f}",
        f"{row.ttft_p95_ms:.1f}",
        f"{row.ttft_p95_alone_ms:.1f}",
        f"{row.resident_mib:.0f}",
        outcomes + (" UNFORESEEN" if row.unforeseen else ""),
    )
    return _line(cells)


def _line(cells: Sequence[object]) -> str:
    widths = (14, 9, 6, 12, 12, 8, 8, 7, 8, 0)
    return " ".join(f"{cell!s:>{width}}" for cell, width in zip(cells, widths, strict=True))
