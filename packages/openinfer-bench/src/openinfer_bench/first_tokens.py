"""Where the time to a request's first token went, from the spans of a trace (`--trace FILE` of serve).

    submitted ── waits ──┬── its prefix is loaded ──► first step ── prefill ──► first token
                         └── nothing to load ───────┘

`waits` is what comes before the load, or before the first step: for the loads of others, and for the rest: for a slot,
for blocks, and for the step under way. In `prefill` the device is busy with steps, of which others may have rows.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from openinfer_engine.tracing.trace import DEVICE, TIERS

Interval = tuple[float, float]
"""Begin and end, microseconds."""

_LATE_US = 2000.0
"""By which the end of a load, which is seen when the next step is planned, may come after the first step's time."""

_TOGETHER_US = 1000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    """Of one request; milliseconds."""

    prompt_tokens: int
    submitted_us: float
    """On the trace's clock, in microseconds."""
    others_loads_ms: float
    """Before its own load began, while others were loading."""
    waits_ms: float
    """Else, before its load began, or before its first step without one."""
    load_ms: float
    loaded_blocks: int
    after_load_ms: float
    """From the end of its load to its first step."""
    prefill_ms: float
    device_ms: float
    """Of `prefill_ms`, in steps of the device."""

    @property
    def total_ms(self) -> float:
        return self.others_loads_ms + self.waits_ms + self.load_ms + self.after_load_ms + self.prefill_ms


@dataclass(slots=True)
class _Load:
    begin: float
    end: float
    blocks: int
    is_taken: bool = False


def first_tokens(events: Sequence[Mapping[str, Any]]) -> list[FirstToken]:
    """One for each request that has a first token, in the order in which they were submitted."""
    loads, steps = _spans(events, TIERS, "load"), _spans(events, DEVICE, "step")
    all_loads = [_Load(begin, end, int(args["completed"])) for begin, end, args in loads]
    busy = [(begin, end) for begin, end, _ in steps]
    found: list[FirstToken] = []
    for prompt_tokens, (submitted, planned), (_, first_token) in sorted(_phases(events), key=lambda each: each[1][1]):
        load = _load_of(all_loads, submitted, planned)
        begin, end = (planned, planned) if load is None else (load.begin, min(load.end, planned))
        others = _overlap(submitted, begin, [(each.begin, each.end) for each in all_loads])
        found.append(
            FirstToken(
                prompt_tokens=prompt_tokens,
                submitted_us=submitted,
                others_loads_ms=others / 1e3,
                waits_ms=(begin - submitted - others) / 1e3,
                load_ms=(end - begin) / 1e3,
                loaded_blocks=0 if load is None else load.blocks,
                after_load_ms=(planned - end) / 1e3,
                prefill_ms=(first_token - planned) / 1e3,
                device_ms=_overlap(planned, first_token, busy) / 1e3,
            )
        )
    return sorted(found, key=lambda each: each.submitted_us)


def medians(found: Sequence[FirstToken]) -> dict[str, float]:
    """Of each part, and of the whole; nothing of no request."""
    if not found:
        return {}
    rows = [asdict(each) | {"total_ms": each.total_ms} for each in found]
    names = [name for name in rows[0] if name not in ("prompt_tokens", "submitted_us")]
    return {"requests": len(found)} | {name: round(statistics.median(row[name] for row in rows), 2) for name in names}


def _spans(events: Iterable[Mapping[str, Any]], track: str, name: str) -> list[tuple[float, float, Mapping[str, Any]]]:
    events = list(events)
    tracks = {event["tid"] for event in events if event["name"] == "thread_name" and event["args"]["name"] == track}
    chosen = (each for each in events if each["ph"] == "X" and each["tid"] in tracks and each["name"] == name)
    return [(each["ts"], each["ts"] + each["dur"], each["args"]) for each in chosen]


def _phases(events: Iterable[Mapping[str, Any]]) -> list[tuple[int, Interval, Interval]]:
    """Prompt tokens, queue and prefill of each request that has both."""
    begins: dict[tuple[str, str], Mapping[str, Any]] = {}
    phases: dict[str, dict[str, Interval]] = {}
    tokens: dict[str, int] = {}
    for event in events:
        if event["ph"] == "b":
            begins[event["id"], event["name"]] = event
        elif event["ph"] == "e":
            begin = begins.pop((event["id"], event["name"]))
            phases.setdefault(event["id"], {})[event["name"]] = (begin["ts"], event["ts"])
            tokens[event["id"]] = begin["args"]["prompt_tokens"]
    both = {name: each for name, each in phases.items() if {"queue", "prefill"} <= each.keys()}
    return [(tokens[name], each["queue"], each["prefill"]) for name, each in both.items()]


def _load_of(loads: Sequence[_Load], submitted: float, planned: float) -> _Load | None:
    """What ended last before a request's first step, begun since it was submitted, and no other's.

    KV blocks and recurrent states are two loads that begin together.
    """
    own = [each for each in loads if not each.is_taken and submitted <= each.begin and each.end <= planned + _LATE_US]
    if not own:
        return None
    last = max(own, key=lambda each: each.end)
    together = [each for each in own if abs(each.begin - last.begin) <= _TOGETHER_US]
    for each in together:
        each.is_taken = True
    return _Load(min(each.begin for each in together), last.end, sum(each.blocks for each in together), is_taken=True)


def _overlap(begin: float, end: float, intervals: Iterable[Interval]) -> float:
    """Of the time between, how much is in any of the intervals."""
    covered, reached = 0.0, begin
    for first, last in sorted(intervals):
        start, stop = max(first, reached), min(last, end)
        if stop > start:
            covered, reached = covered + stop - start, stop
    return covered
