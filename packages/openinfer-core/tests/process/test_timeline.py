"""The timeline of a start: phases touch, and the system is asked where it can tell."""

import gc
import sys
import time

import pytest

from openinfer_core.process.resident import resident_bytes, settle_memory
from openinfer_core.process.timeline import Timeline, process_age_s


def test_phases_touch_and_begin_where_they_were_told() -> None:
    times = iter([12.0, 15.5])
    timeline = Timeline(begin_s=10.0, clock=lambda: next(times))
    timeline.mark("imports")
    timeline.mark("weights", device_bytes=7)
    assert [(phase.name, phase.begin_s, phase.seconds) for phase in timeline.phases] == [
        ("imports", 10.0, 2.0),
        ("weights", 12.0, 3.5),
    ]
    assert [phase.device_bytes for phase in timeline.phases] == [0, 7]


@pytest.mark.skipif(sys.platform != "linux", reason="read from /proc")
def test_process_begins_before_its_first_line_and_takes_memory() -> None:
    begin_s = time.time()
    timeline = Timeline()
    timeline.mark("all")
    assert process_age_s() > 0
    assert timeline.phases[0].begin_s < begin_s
    assert 2**20 < resident_bytes() < 2**36


def test_text_has_all_phases_in_one_line() -> None:
    timeline = Timeline(begin_s=0.0, clock=lambda: 1.25)
    timeline.mark("imports")
    timeline.mark("ready")
    assert str(timeline).startswith("1.25 s: imports 1.25, ready 0.00; ")


def test_settled_memory_is_still_a_working_process() -> None:
    settle_memory()
    gc.unfreeze()
    assert resident_bytes() >= 0
