"""How long the other end of a link may say nothing."""

import threading

import pytest

from openinfer_engine.ranks.silence import BEATS_PER_LIMIT, Silence, Ticker


def looks_until_gone(silence: Silence, elapsed_s: float, *, most: int = 1000) -> int:
    return next(count for count in range(1, most) if silence.look(elapsed_s))


def test_silence_beyond_the_limit_is_noticed_within_one_interval() -> None:
    silence = Silence(limit_s=8)
    assert silence.interval_s == 1
    assert looks_until_gone(silence, 1.0) == 9


def test_each_frame_begins_the_silence_anew() -> None:
    silence = Silence(limit_s=8)
    for _ in range(5):
        assert not any(silence.look(1.0) for _ in range(8))
        silence.heard()
    assert looks_until_gone(silence, 1.0) == 9


@pytest.mark.parametrize("elapsed_s", [60.0, 86_400.0])
def test_a_pause_of_this_end_is_no_silence_of_the_other(elapsed_s: float) -> None:
    """A debugger or a suspended machine stops both; what then is counted is little."""
    silence = Silence(limit_s=8)
    assert not silence.look(elapsed_s)
    assert looks_until_gone(silence, elapsed_s) == BEATS_PER_LIMIT // 2


def test_a_new_limit_begins_the_silence_anew() -> None:
    silence = Silence(limit_s=2)
    silence.look(0.4)
    silence.set_limit(8)
    assert looks_until_gone(silence, 1.0) == 9


def test_ticker_calls_with_the_time_of_its_clock_and_ends() -> None:
    times = iter([0.0, 3.0, 10.0])
    seen: list[float] = []
    done = threading.Event()

    def call(elapsed_s: float) -> None:
        seen.append(elapsed_s)
        if len(seen) == 2:
            ticker.end()
            done.set()

    ready = threading.Event()

    def clock() -> float:
        ready.wait()
        return next(times)

    ticker = Ticker(call, interval_s=0.001, clock=clock, name="test")
    ready.set()
    assert done.wait(60)
    ticker.join()
    assert seen == [3.0, 7.0]
