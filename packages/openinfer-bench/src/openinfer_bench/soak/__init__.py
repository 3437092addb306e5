"""`openinfer bench soak`: a server under mixed traffic for an hour, with kills of its processes, and what it keeps.

Streams, chats, prefixes that only KV tiers hold, known and new grammars, clients that leave, requests that are refused
and stored responses come at one rate; all the while the process that checks grammars and an API worker are killed in
turn. It fails if memory grows (the mean of the last sixth of the time over that of the second), a descriptor is left
after draining, an answer is not the one that its request foresees, or fewer requests were answered than the rate asks.
Linux, and a model of a few megabytes.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from openinfer_bench.http_client import Address
from openinfer_bench.served import served
from openinfer_bench.soak.kills import Kills, keep_killing
from openinfer_bench.soak.observation import Observation, observe, settle
from openinfer_bench.soak.traffic import KINDS, Traffic, warm_up
from openinfer_core.provenance import provenance

OPENINFER_CONTRACT = 1

MEMORY_BOUND = 1.02
RATE_BOUND = 20.0  # requests/s that were answered
KILL_EVERY_S = 45.0  # three deaths of workers in a minute would end the server
SAMPLE_EVERY_S = 15.0
_SIXTHS = 6


def run(argv: Sequence[str]) -> int:
    """Soaks and prints a table; `--json FILE` also writes it. Returns 1 if a bound was missed."""
    arguments = _parser().parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="openinfer-soak-") as folder:
        flags = [
            *("--model", "tiny", "--workers", "2", "--num-blocks", "1024", "--max-stored-responses", "128"),
            *("--kv-tier", "host=16MiB", "--kv-tier", f"disk={folder}/kv,64MiB", "--log-level", "error"),
        ]
        with served([*flags, *arguments.flags]) as server:
            report = asyncio.run(_soak(Address(server.host, server.port), server.pid, arguments))
    sys.stdout.write(_table(report))
    if arguments.json is not None:
        made_of = msgspec.to_builtins(provenance())
        text = json.dumps({**made_of, "flags": [*flags[:-6], *arguments.flags], **report}, indent=2)
        Path(arguments.json).write_text(text + "\n")
    return 1 if report["missed"] else 0


async def _soak(address: Address, pid: int, arguments: argparse.Namespace) -> dict[str, Any]:
    kinds = {kind: weight for kind, weight in KINDS.items() if kind in arguments.kinds}
    traffic, kills = Traffic(address, random.Random(arguments.seed), kinds), Kills()  # noqa: S311 - the same requests each time
    await warm_up(traffic)
    before = await settle(pid)
    samples: list[Observation] = []
    sampling = asyncio.create_task(_keep_observing(pid, samples))
    killing = asyncio.create_task(keep_killing(pid, kills, every_s=arguments.kill_every_s))
    await traffic.send(rate=arguments.rate, seconds=arguments.seconds)
    for task in (sampling, killing):
        task.cancel()
    await asyncio.gather(sampling, killing, return_exceptions=True)
    await warm_up(traffic)  # the guard process is there again
    after = await settle(pid, until=before.descriptors)
    unforeseen = traffic.unforeseen(kills.workers_s)
    early, late = mean_of_sixth(samples, 1), mean_of_sixth(samples, _SIXTHS - 1)
    missed = {
        "memory": late > MEMORY_BOUND * early,
        "descriptors": after.descriptors != before.descriptors,
        "answers": bool(unforeseen),
        "rate": traffic.answered_per_s < min(RATE_BOUND, 0.9 * arguments.rate),
    }
    return {
        "set_up": {"rate": arguments.rate, "seconds": arguments.seconds, "seed": arguments.seed, "kinds": kinds},
        "answered_per_s": traffic.answered_per_s,
        "answers": {kind: dict(counts) for kind, counts in sorted(traffic.counts.items())},
        "unforeseen": unforeseen,
        "kills": {"guards": len(kills.guards_s), "workers": len(kills.workers_s)},
        "memory_mib": {"second_sixth": early, "last_sixth": late, "ratio": late / early, "bound": MEMORY_BOUND},
        "descriptors": {"before": before.descriptors, "after": after.descriptors, "segments": after.segments},
        "missed": [name for name, is_missed in missed.items() if is_missed],
        "samples": [{**asdict(each), "at_s": round(each.at_s - samples[0].at_s, 1)} for each in samples],
    }


async def _keep_observing(pid: int, samples: list[Observation]) -> None:
    while True:
        samples.append(await observe(pid))
        await asyncio.sleep(SAMPLE_EVERY_S)


def mean_of_sixth(samples: Sequence[Observation], place: int) -> float:
    """The mean memory, in MiB, of one sixth of the time."""
    begin, end = (len(samples) * each // _SIXTHS for each in (place, place + 1))
    chosen = [each.proportional_mib for each in samples[begin : max(end, begin + 1)]]
    return sum(chosen) / len(chosen)


def _table(report: dict[str, Any]) -> str:
    memory, descriptors, kills = report["memory_mib"], report["descriptors"], report["kills"]
    lines = [
        f"{'kind':<12} outcomes",
        *(f"{kind:<12} {counts}" for kind, counts in report["answers"].items()),
        f"answered per second   {report['answered_per_s']:.1f}",
        f"killed                {kills['guards']} guards, {kills['workers']} workers",
        f"memory, MiB           {memory['second_sixth']:.1f}, in the end {memory['last_sixth']:.1f}",
        f"memory, ratio         {memory['ratio']:.3f} (at most {MEMORY_BOUND})",
        f"descriptors           {descriptors['before']}, after draining {descriptors['after']}",
        *(f"unforeseen            {each}" for each in report["unforeseen"][:10]),
        f"missed: {', '.join(report['missed'])}" if report["missed"] else "passed",
    ]
    return "\n".join(lines) + "\n"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="openinfer bench soak", description=__doc__, allow_abbrev=False)
    parser.add_argument("--seconds", type=float, default=3600.0, metavar="X", help="how long (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=24.0, metavar="X", help="requests/s (default: %(default)s)")
    parser.add_argument("--kinds", nargs="+", choices=[*KINDS], default=[*KINDS], metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--kill-every-s", type=float, default=KILL_EVERY_S, metavar="X", help="0 kills nothing")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the requests (default: %(default)s)")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="further flags of the server, last")
    parser.add_argument("--json", metavar="FILE", help="write the figures to FILE")
    return parser
