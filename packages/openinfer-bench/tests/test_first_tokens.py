"""Where the time to a first token went: spans whose parts are known."""

from collections.abc import Mapping
from typing import Any

import pytest

from openinfer_bench.first_tokens import first_tokens, medians

LOOP, DEVICE, TIERS = 0, 1, 2
MS = 1000.0
Event = Mapping[str, Any]


def named(tid: int, name: str) -> Event:
    return {"name": "thread_name", "ph": "M", "pid": 1, "tid": tid, "args": {"name": name}}


def span(tid: int, name: str, begin_ms: float, end_ms: float, **args: int) -> Event:
    return {"name": name, "ph": "X", "tid": tid, "ts": begin_ms * MS, "dur": (end_ms - begin_ms) * MS, "args": args}


def request(name: str, *times_ms: float, tokens: int = 100) -> list[Event]:
    """Phases between its times: submitted, first step, first token, end."""
    found: list[Event] = []
    for phase, begin, end in zip(("queue", "prefill", "decode"), times_ms, times_ms[1:], strict=False):
        place = {"id": name, "name": phase, "pid": 2}
        found.append({**place, "ph": "b", "ts": begin * MS, "args": {"prompt_tokens": tokens}})
        found.append({**place, "ph": "e", "ts": end * MS})
    return found


TRACKS = [named(LOOP, "loop"), named(DEVICE, "device"), named(TIERS, "tiers")]


def test_parts_of_a_request_that_loads_after_another() -> None:
    events = [
        *TRACKS,
        span(TIERS, "load", 10, 60, blocks=40, completed=40),
        span(TIERS, "load", 70, 170, blocks=80, completed=80),
        span(TIERS, "save", 20, 300, blocks=8, completed=8),
        span(DEVICE, "step", 60, 90, step=1),
        span(DEVICE, "step", 175, 195, step=2),
        *request("a", 8, 61, 92, 95),
        *request("b", 30, 172, 200, 210),
        *request("unanswered", 40, 180),
    ]
    first, second = first_tokens(events)

    assert (first.waits_ms, first.load_ms, first.after_load_ms) == (2.0, 50.0, 1.0)
    assert (first.others_loads_ms, first.loaded_blocks, first.device_ms) == (0.0, 40, 29.0)
    assert (second.others_loads_ms, second.waits_ms, second.load_ms) == (30.0, 10.0, 100.0)
    assert (second.prefill_ms, second.device_ms) == (28.0, 20.0)
    assert second.total_ms == pytest.approx(170.0)


def test_states_and_blocks_that_are_loaded_together_are_one_load() -> None:
    load = [span(TIERS, "load", 5, 15, blocks=9, completed=9), span(TIERS, "load", 5.1, 25, blocks=90, completed=90)]
    (found,) = first_tokens([*TRACKS, *load, *request("a", 4, 26, 40)])
    assert (found.load_ms, found.loaded_blocks, found.others_loads_ms) == (20.0, 99, 0.0)


def test_without_a_load_all_of_the_queue_is_waiting() -> None:
    (found,) = first_tokens([*TRACKS, *request("a", 0, 12, 20, 30)])
    assert (found.waits_ms, found.load_ms, found.after_load_ms, found.prefill_ms) == (12.0, 0.0, 0.0, 8.0)


def test_medians_are_of_each_part() -> None:
    events = [*TRACKS, *request("a", 0, 2, 20), *request("b", 100, 104, 120), *request("c", 200, 209, 230)]
    told = medians(first_tokens(events))
    assert (told["requests"], told["waits_ms"], told["prefill_ms"], told["total_ms"]) == (3, 4.0, 18.0, 20.0)
    assert medians([]) == {}
