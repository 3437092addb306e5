"""What large bodies were decoded to: no garbage is collected while it lives, and it is freed piece by piece."""

import gc
import json
import sys
import weakref

import pytest

from openinfer_server import ServerOptions
from openinfer_server.http.large_values import LONGEST_PAUSE_S, CollectorPause, take_apart
from openinfer_server.http.sliced_json import decode_in_slices
from openinfer_server.testing import ParrotLoop, wait_until


class Leaf:
    """Something whose end can be seen."""


class Collector:
    """A pause whose clock the test turns."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_collections = 0
        self.pause = CollectorPause(clock=lambda: self.now_s, collect=self.collect)

    def collect(self) -> None:
        self.num_collections += 1


@pytest.fixture(autouse=True)
def _collector_goes_on():
    yield
    assert gc.isenabled()


def test_collector_pauses_until_the_last_large_value_is_freed() -> None:
    pause = Collector().pause
    pause.begin()
    pause.begin()
    assert not gc.isenabled()
    pause.end()
    assert not gc.isenabled()
    pause.end()
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    pause = Collector().pause
    gc.disable()
    try:
        pause.begin()
        pause.end()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_pause_that_does_not_end_has_a_collection_each_ten_seconds() -> None:
    collector = Collector()
    collector.pause.begin()
    for now_s in (1.0, LONGEST_PAUSE_S, LONGEST_PAUSE_S + 1, 2 * LONGEST_PAUSE_S):
        collector.now_s = now_s
        collector.pause.begin()
        collector.pause.end()
    assert collector.num_collections == 2
    collector.pause.end()


def test_values_are_taken_apart_and_what_others_refer_to_is_left() -> None:
    leaf, kept_leaf = Leaf(), Leaf()
    ends = [weakref.ref(leaf), weakref.ref(kept_leaf)]
    kept = {"b": [kept_leaf]}
    held = [{"a": [[leaf], {"c": 1}], "kept": [kept]}]
    del leaf, kept_leaf
    take_apart(held)
    assert held == []
    assert ends[0]() is None
    assert list(kept) == ["b"]
    assert kept["b"] == [ends[1]()]


def test_no_container_is_freed_with_others_inside_it() -> None:
    """Each is empty when it goes, so that none is freed for long; as deep as the decoder bears, too."""
    value = decode_in_slices(json.dumps({"a": [[{"b": [1, 2]}] * 3] * 1000, "c": {}}).encode())
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    calls: list[int] = []

    def count(frame: object, event: str, argument: object) -> None:
        del frame
        if event == "c_call" and getattr(argument, "__name__", "") == "clear":
            calls.append(1)

    held = [value, deep]
    del value, deep
    sys.setprofile(count)
    try:
        take_apart(held)
    finally:
        sys.setprofile(None)
    # 100,001 lists, and of the other value 2 dicts, 1,001 lists, 3,000 of them with a dict and a list
    assert sum(calls) == 100_001 + 2 + 1_001 + 3 * 1000 * 2


def test_server_collects_garbage_again_when_large_requests_are_over(start, call, info) -> None:
    server = start(ParrotLoop(info), ServerOptions(port=0))
    large = {"a": [[i] for i in range(20_000)]}
    for body in ({"prompt": "stone", "max_tokens": 1, "metadata": large}, {"prompt": "a", "unknown": large}):
        call(server, "POST", "/v1/completions", body)
        wait_until(gc.isenabled, "the end of the pause")
