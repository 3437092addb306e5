"""The order in which ranks and requests are told, and what is undone when something fails."""

import pytest

from openinfer_core import Refused
from openinfer_core.control import InFlight, Pause, Resume, Sleep, UpdateWeights, Wake
from openinfer_core.engine import EngineState, EngineStats
from openinfer_engine.errors import GroupBroken
from openinfer_engine.lifecycle.lifecycle import PARK_TIMEOUT_S, Lifecycle, WeightsInUse
from openinfer_engine.lifecycle.orders import (
    CloseWeights,
    DropWeights,
    GiveBack,
    KeepWeights,
    LoadWeights,
    OpenWeights,
    TakeBack,
    WeightsOrder,
    WeightsSource,
)

SEGMENTS = WeightsSource(segments=("new",))


class Engine:
    """Ranks, requests and a clock that note what they are told."""

    def __init__(self, *, on_device: bool = False) -> None:
        self.told: list[object] = []
        self.fails: dict[type, BaseException] = {}
        self.parks_after = 1
        self.now_s = 0.0
        weights = WeightsInUse(WeightsSource(), root=None, on_device=on_device)
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
    assert not {DropWeights(), GiveBack(), LoadWeights()} & {each for each in engine.told if not isinstance(each, str)}
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


def test_sleep_of_one_that_is_asleep_ends_requests_where_that_is_asked_and_does_no_more(engine: Engine) -> None:
    engine.lifecycle.obey(Sleep())
    engine.told.clear()
    engine.lifecycle.obey(Sleep(keeps_weights=False))
    assert engine.told == []
    engine.lifecycle.obey(Sleep(requests=InFlight.ABORT))
    assert engine.told == ["abort all"]
    assert engine.state() is EngineState.ASLEEP


def test_sleep_drops_after_parking_and_wake_loads_what_was_held_open(engine: Engine) -> None:
    engine.lifecycle.obey(Sleep())
    dropped = [OpenWeights(WeightsSource()), "park", ("renew", ""), DropWeights(), GiveBack()]
    assert engine.told == dropped
    engine.lifecycle.obey(Wake())
    assert engine.told == [*dropped, TakeBack(), LoadWeights(), CloseWeights()]


@pytest.fixture
def on_device() -> Engine:
    """An engine whose weights are in memory of a device."""
    return Engine(on_device=True)


def test_sleep_keeps_weights_of_a_device_on_the_host_and_reads_no_file(on_device: Engine) -> None:
    on_device.lifecycle.obey(Sleep())
    kept = [KeepWeights(), "park", ("renew", ""), GiveBack()]
    assert on_device.told == kept
    on_device.lifecycle.obey(Wake())
    assert on_device.told == [*kept, TakeBack()]
    assert on_device.state() is EngineState.SERVING


def test_sleep_without_weights_reads_them_again_on_a_device(on_device: Engine) -> None:
    on_device.lifecycle.obey(Sleep(keeps_weights=False))
    dropped = ["park", ("renew", ""), DropWeights(), GiveBack()]
    assert on_device.told == dropped
    on_device.lifecycle.obey(Wake())
    assert on_device.told == [*dropped, OpenWeights(WeightsSource()), TakeBack(), LoadWeights(), CloseWeights()]


def test_weights_of_shared_memory_are_kept_on_the_host_of_a_device(on_device: Engine) -> None:
    on_device.lifecycle.obey(UpdateWeights(segments=("new",), content_hash="a" * 64))
    on_device.told.clear()
    on_device.lifecycle.obey(Sleep())
    on_device.lifecycle.obey(Wake())
    assert on_device.told == [KeepWeights(), "park", ("renew", "content"), GiveBack(), TakeBack()]
    assert on_device.state() is EngineState.SERVING


def test_weights_that_the_host_has_no_room_for_refuse_the_sleep_and_tell_no_request(on_device: Engine) -> None:
    on_device.fails[KeepWeights] = Refused("no memory")
    with pytest.raises(Refused, match="no memory"):
        on_device.lifecycle.obey(Sleep())
    assert on_device.told == [KeepWeights()]
    assert on_device.state() is EngineState.SERVING


@pytest.mark.parametrize("keeps_weights", [True, False])
def test_memory_that_others_took_leaves_the_engine_asleep_until_it_is_free(
    on_device: Engine, *, keeps_weights: bool
) -> None:
    on_device.lifecycle.obey(Sleep(keeps_weights=keeps_weights))
    on_device.fails[TakeBack] = Refused("other processes hold it")
    for _ in range(2):
        with pytest.raises(Refused, match="stays asleep: other processes hold it"):
            on_device.lifecycle.obey(Wake())
        assert on_device.told[-2:] == [TakeBack(), GiveBack()]
        assert LoadWeights() not in on_device.told
        assert on_device.state() is EngineState.ASLEEP
    on_device.fails.clear()
    on_device.lifecycle.obey(Wake())
    assert on_device.state() is EngineState.SERVING
    assert (LoadWeights() in on_device.told) == (not keeps_weights)


def test_weights_that_cannot_be_read_after_a_sleep_give_the_memory_back_again(on_device: Engine) -> None:
    on_device.lifecycle.obey(Sleep(keeps_weights=False))
    on_device.fails[LoadWeights] = RuntimeError("the disk")
    with pytest.raises(Refused, match="stays asleep"):
        on_device.lifecycle.obey(Wake())
    assert on_device.told[-3:] == [LoadWeights(), DropWeights(), GiveBack()]
    assert on_device.state() is EngineState.ASLEEP


def test_engine_without_weights_sleeps_without_keeping_any(on_device: Engine) -> None:
    on_device.fails[LoadWeights] = RuntimeError("the disk")
    with pytest.raises(Refused, match="no weights"):
        on_device.lifecycle.obey(UpdateWeights(segments=("new",)))
    on_device.fails.clear()
    on_device.told.clear()
    on_device.lifecycle.obey(Sleep())
    assert KeepWeights() not in on_device.told
    on_device.lifecycle.obey(Wake())
    assert on_device.state() is EngineState.WITHOUT_WEIGHTS
