"""The order in which ranks and requests are told, and what is undone when something fails."""

import pytest

from openinfer_core import Refused
from openinfer_core.control import InFlight, Pause, Resume, Sleep, UpdateWeights, Wake
from openinfer_core.engine import EngineState, EngineStats
from openinfer_engine.errors import GroupBroken
from openinfer_engine.lifecycle.lifecycle import PARK_TIMEOUT_S, Lifecycle, WeightsInUse
from openinfer_engine.lifecycle.orders import (
    CloseWeights,
    DropKv,
    DropWeights,
    LoadWeights,
    OpenWeights,
    WeightsOrder,
    WeightsSource,
)

SEGMENTS = WeightsSource(segments=("new",))


class Engine:
    """Ranks, requests and a clock that note what they are told."""

    def __init__(self) -> None:
        self.told: list[object] = []
        self.fails: dict[type, BaseException] = {}
        self.parks_after = 1
        self.now_s = 0.0
        weights = WeightsInUse(WeightsSource(), root=None)
        self.lifecycle = Lifecycle(self, self, weights, clock=lambda: self.now_s)

    def obey(self, order: WeightsOrder) -> None:
        self.told.append(order)
        if type(order) in self.fails:
            raise self.fails[type(order)]

    def park(self) -> bool:
        self.told.append("park")
        self.parks_after -= 1
        return self.parks_after <= 0

    def renew_cache(self, kv_version: str) -> None:
        self.told.append(("renew", kv_version.partition(" ")[0]))

    def end_all(self, failure: str | None) -> None:
        self.told.append("abort all" if failure is None else "fail all")

    def wait_for_copies(self, timeout_s: float) -> None:
        self.now_s += timeout_s * 1000

    def state(self) -> EngineState:
        return self.lifecycle.told_in(EngineStats()).state


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_update_reads_only_what_was_checked_after_all_requests_are_parked(engine: Engine) -> None:
    engine.parks_after = 3
    engine.lifecycle.obey(UpdateWeights(segments=("new",)))
    order = [OpenWeights(SEGMENTS), "park", "park", "park", DropWeights(), LoadWeights(), CloseWeights()]
    assert engine.told == [*order, ("renew", "drawn")]


def test_numbers_are_drawn_anew_each_time(engine: Engine) -> None:
    versions = set()
    for _ in range(100):
        engine.lifecycle.obey(UpdateWeights(segments=("new",)))
        versions.add(engine.lifecycle.told_in(EngineStats()).weights_version)
    assert len(versions) == 100


def test_update_that_does_not_fit_tells_no_request(engine: Engine) -> None:
    engine.fails[OpenWeights] = Refused("another shape")
    with pytest.raises(Refused, match="another shape"):
        engine.lifecycle.obey(UpdateWeights(segments=("new",)))
    assert engine.told == [OpenWeights(SEGMENTS)]
    assert engine.state() is EngineState.SERVING


@pytest.mark.parametrize("command", [UpdateWeights(segments=("new",)), Sleep()])
def test_copies_that_do_not_end_refuse_the_command_and_nothing_is_dropped(engine: Engine, command) -> None:
    engine.parks_after = 10**9
    with pytest.raises(Refused, match="copies of KV are still under way"):
        engine.lifecycle.obey(command)
    assert engine.now_s > PARK_TIMEOUT_S
    assert engine.told[-1] == CloseWeights()
    assert not {DropWeights(), DropKv(), LoadWeights()} & {each for each in engine.told if not isinstance(each, str)}
    assert engine.state() is EngineState.SERVING


def test_failure_while_reading_fails_requests_and_draws_a_version_for_what_is_gone(engine: Engine) -> None:
    engine.fails[LoadWeights] = RuntimeError("the disk")
    with pytest.raises(Refused, match="no weights"):
        engine.lifecycle.obey(UpdateWeights(segments=("new",), content_hash="a" * 64))
    after = engine.told[engine.told.index(LoadWeights()) + 1 :]
    assert after == [DropWeights(), CloseWeights(), "fail all", ("renew", "drawn")]
    assert engine.lifecycle.refusal is not None
    assert engine.state() is EngineState.WITHOUT_WEIGHTS
    engine.fails.clear()
    engine.lifecycle.obey(UpdateWeights(segments=("new",), content_hash="a" * 64))
    assert engine.told[-1] == ("renew", "content")
    assert engine.lifecycle.refusal is None


def test_rank_that_is_gone_is_no_refusal(engine: Engine) -> None:
    engine.fails[LoadWeights] = GroupBroken("rank 1 has died")
    with pytest.raises(GroupBroken):
        engine.lifecycle.obey(UpdateWeights(segments=("new",)))


def test_requests_end_before_weights_are_read_where_that_is_asked(engine: Engine) -> None:
    engine.lifecycle.obey(UpdateWeights(segments=("new",), requests=InFlight.ABORT))
    assert engine.told.index("abort all") < engine.told.index(DropWeights())
    engine.told.clear()
    engine.lifecycle.obey(Pause(InFlight.ABORT))
    assert engine.told == ["abort all"]
    assert engine.state() is EngineState.PAUSED
    engine.lifecycle.obey(Resume())
    assert engine.state() is EngineState.SERVING


def test_pause_outlasts_a_sleep(engine: Engine) -> None:
    for command, state in (
        (Pause(), EngineState.PAUSED),
        (Sleep(), EngineState.ASLEEP),
        (Resume(), EngineState.ASLEEP),
        (Pause(), EngineState.ASLEEP),
        (Wake(), EngineState.PAUSED),
        (Resume(), EngineState.SERVING),
    ):
        engine.lifecycle.obey(command)
        assert engine.state() is state


def test_sleep_drops_after_parking_and_wake_loads_what_was_held_open(engine: Engine) -> None:
    engine.lifecycle.obey(Sleep())
    dropped = [OpenWeights(WeightsSource()), "park", ("renew", ""), DropWeights(), DropKv()]
    assert engine.told == dropped
    engine.lifecycle.obey(Wake())
    assert engine.told == [*dropped, LoadWeights(), CloseWeights()]
