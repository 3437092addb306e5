"""`openinfer bench trace FILE`: what a trace says about idle time of the device, and where the host's time went.

A gap lies between two steps of the device while a request was open all along: time in which it had nothing to do, and
should have. Within a step the device may wait for launches, too; that is not seen from outside. The last line says
where the time to the first token went (`first_tokens.py`).
"""

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from openinfer_bench.first_tokens import first_tokens, medians
from openinfer_core import InvalidRequest
from openinfer_engine.tracing.trace import DEVICE

OPENINFER_CONTRACT = 1

Interval = tuple[float, float]
"""Begin and end, microseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSummary:
    """Of one run; times in microseconds."""

    steps: int
    busy_share: float
    """Of the time from the first step's beginning to the last one's end, without what no request was open in."""
    gaps_us: tuple[float, ...]
    """Idle time before each step but the first, 0 where it was queued in time."""
    spans_us: Mapping[str, tuple[float, ...]]
    """Durations by track and name, sorted."""
    first_token_ms: Mapping[str, float]
    """Medians of the parts of the time to a request's first token."""

    def table(self) -> str:
        """For the terminal."""
        gaps = _percentiles(self.gaps_us)
        lines = [
            f"device   {self.steps} steps, busy {self.busy_share:.2%} of the time in which a request was open",
            f"gaps     p50 {gaps[0]:.1f} us, p99 {gaps[1]:.1f} us, longest {gaps[2]:.1f} us",
            f"{'span':<18} {'number':>8} {'p50 us':>10} {'p99 us':>10} {'longest':>10}",
        ]
        for name, durations in self.spans_us.items():
            p50, p99, longest = _percentiles(durations)
            lines.append(f"{name:<18} {len(durations):>8} {p50:>10.1f} {p99:>10.1f} {longest:>10.1f}")
        if self.first_token_ms:
            parts = ", ".join(f"{name.removesuffix('_ms')} {value}" for name, value in self.first_token_ms.items())
            lines.append(f"first tokens, medians in ms: {parts}")
        return "\n".join(lines) + "\n"


def summarise(events: Sequence[Mapping[str, Any]]) -> TraceSummary:
    """Summarises trace events as `Trace.events` makes them."""
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    spans: dict[str, list[float]] = {}
    steps: list[Interval] = []
    for event in events:
        if event["ph"] == "X":
            track = tracks[event["tid"]]
            spans.setdefault(f"{track}: {event['name']}", []).append(event["dur"])
            if track == DEVICE:
                steps.append((event["ts"], event["ts"] + event["dur"]))
    steps.sort()
    work = _union(_requests(events))
    idle = [(end, max(begin, end)) for (_, end), (begin, _) in pairwise(steps)]
    gaps = tuple(end - begin if _is_within(begin, end, work) else 0.0 for begin, end in idle)
    busy = sum(end - begin for begin, end in _union(steps))
    return TraceSummary(
        steps=len(steps),
        busy_share=busy / (busy + sum(gaps)) if steps else 0.0,
        gaps_us=gaps,
        spans_us={name: tuple(sorted(durations)) for name, durations in sorted(spans.items())},
        first_token_ms=medians(first_tokens(events)),
    )


def run(argv: Sequence[str]) -> int:
    """Prints the summary of a trace file."""
    parser = argparse.ArgumentParser(prog="openinfer bench trace", description=__doc__, allow_abbrev=False)
    parser.add_argument("file", help="the file that --trace FILE of serve, generate or bench offline wrote")
    sys.stdout.write(summarise_file(Path(parser.parse_args(argv).file)).table())
    return 0


def summarise_file(path: Path) -> TraceSummary:
    """Summarises what `Trace.close` wrote.

    Raises:
        InvalidRequest: the file is no trace.
    """
    try:
        events = json.loads(path.read_bytes())["traceEvents"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(f"{path} is no trace: {error}", field="file") from error
    return summarise(events)


def _requests(events: Iterable[Mapping[str, Any]]) -> list[Interval]:
    """When requests were open: each phase of each."""
    begins: dict[tuple[str, str], float] = {}
    found: list[Interval] = []
    for event in events:
        if event["ph"] == "b":
            begins[event["id"], event["name"]] = event["ts"]
        elif event["ph"] == "e":
            found.append((begins.pop((event["id"], event["name"])), event["ts"]))
    return found


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time in intervals that do not touch."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def _is_within(begin: float, end: float, intervals: Iterable[Interval]) -> bool:
    return any(first <= begin and end <= last for first, last in intervals)


def _percentiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The median, the 99th percentile and the largest; 0 of nothing."""
    if not values:
        return 0.0, 0.0, 0.0
    p50, p99 = np.percentile(values, [50, 99])
    return float(p50), float(p99), float(max(values))
