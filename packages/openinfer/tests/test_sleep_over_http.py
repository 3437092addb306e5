"""Sleep over HTTP, of real servers: two API workers before two ranks, under traffic, with tiers and events."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from served_tiny import USER, Served, Stream, serving, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="engines sleep on Linux")

POOL = ("--num-blocks", "256", "--max-num-seqs", "8", "--max-model-tokens", "512")
LONG_TOKENS = 150
LARGE = 40_000  # bytes of a request that is answered by a process for large ones, once that runs
TWO_RANKS = ("--tensor-parallel-size", "2", "--rank-host", "process")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(
        tmp_path_factory.mktemp("sleep"), *POOL, *TWO_RANKS, "--workers", "2", "--batch-invariant", "true"
    ) as it:
        yield it


def sleep(served: Served, query: str = "") -> None:
    status, answer = served.ask("POST", f"/sleep{query}")
    assert (status, answer["state"]) == (200, "asleep"), answer


def wake(served: Served) -> None:
    status, answer = served.ask("POST", "/wake_up")
    assert (status, answer["state"]) == (200, "serving"), answer


def asleep_in_flight(served: Served, num_streams: int, query: str = "") -> list[Stream]:
    """Streams that have begun, and had not ended when the engine went to sleep; tried again where they had."""
    for _ in range(20):
        streams = [Stream(served, max_tokens=LONG_TOKENS).begun() for _ in range(num_streams)]
        sleep(served, query)
        if "mode=abort" in query or not any(each.is_whole for each in streams):
            return streams
        wake(served)
    raise AssertionError("this machine cannot send to sleep what has begun")


@pytest.mark.parametrize("level", [1, 2])
def test_requests_in_flight_go_on_after_the_wake_as_if_nothing_had_been(served: Served, level: int) -> None:
    alone = Stream(served, max_tokens=LONG_TOKENS).end().text
    streams = asleep_in_flight(served, 3, f"?level={level}")
    wake(served)
    for each in streams:
        each.end()
        assert (each.status, each.finish_reason, each.text) == (200, "length", alone)


def test_requests_in_flight_end_with_what_they_have_where_that_is_asked(served: Served) -> None:
    whole = Stream(served, max_tokens=LONG_TOKENS).end().text
    for _ in range(20):
        (stream,) = asleep_in_flight(served, 1, "?mode=abort")
        stream.end()  # while it is asleep
        assert stream.status == 200
        assert whole.startswith(stream.text)
        wake(served)
        if stream.finish_reason != "length":  # else it had ended before
            break
    assert 0 < len(stream.text) < len(whole)
    assert Stream(served, max_tokens=LONG_TOKENS).end().text == whole


def test_requests_that_come_asleep_are_told_to_come_again(served: Served) -> None:
    sleep(served)
    messages = [{"role": "user", "content": "hi"}]
    for path, padding, body in (
        ("/v1/completions", 0, {"prompt": "hi"}),
        ("/v1/completions", 0, {"prompt": "hi", "stream": True}),
        ("/v1/completions", LARGE, {"prompt": "hi"}),
        ("/v1/chat/completions", 0, {"messages": messages}),
        ("/v1/messages", LARGE, {"messages": messages, "max_tokens": 4}),
        ("/v1/responses", 0, {"input": "hi"}),
    ):
        status, headers, answer = served.ask_whole("POST", path, body, key=USER, padding=padding)
        assert status == 503, (path, answer)
        assert "asleep" in answer["error"]["message"]
        assert int(headers["retry-after"]) > 0
    assert served.ask("POST", "/tokenize", {"prompt": "hi"}, key=USER)[0] == 200  # needs no engine
    wake(served)
    assert served.complete()[0] == 200


def test_traffic_through_sleeps_and_wakes_loses_no_request(served: Served) -> None:
    """Each is answered whole, with what it says alone, or told to come again."""
    expected = served.said("The sun", max_tokens=24)
    is_over = threading.Event()
    answers: list[tuple[int, object]] = []

    def ask() -> None:
        while not is_over.is_set():
            answers.append(served.complete("The sun", max_tokens=24))

    clients = [threading.Thread(target=ask) for _ in range(5)]
    for each in clients:
        each.start()
    for level in (1, 2, 1, 2):
        so_far = len(answers)
        wait_until(lambda so_far=so_far: len(answers) > so_far + 3, "answers between two sleeps")
        sleep(served, f"?level={level}")
        answers.append(served.complete())  # the clients' own may all be in flight, and wait
        wake(served)
    is_over.set()
    for each in clients:
        each.join()
    assert {status for status, _ in answers} == {200, 503}
    texts = {answer["choices"][0]["text"] for status, answer in answers if status == 200}
    assert texts == {expected}
    stats = served.metrics()
    assert stats["openinfer_num_requests_running"] == stats["openinfer_num_requests_waiting"] == 0


def test_sleeps_and_wakes_at_once_are_all_answered_and_the_last_one_counts(served: Served) -> None:
    answered: list[int] = []

    def command(path: str) -> None:
        answered.append(served.ask("POST", path)[0])

    threads = [threading.Thread(target=command, args=(("/sleep", "/wake_up")[number % 2],)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answered == [200] * 12
    wake(served)
    assert served.complete()[0] == 200


def test_client_that_leaves_and_deadline_that_is_over_end_requests_asleep(served: Served) -> None:
    assert served.ask("POST", "/pause")[0] == 200
    late = Stream(served, deadline_s=0.3)
    leaving = Stream(served)
    wait_until(lambda: served.metrics()["openinfer_num_requests_waiting"] >= 1, "requests that wait")
    sleep(served)
    late.end()
    assert (late.status, "deadline_s of 0.3" in str(late.error)) == (504, True), (late.status, late.error)
    leaving.leave()
    wait_until(lambda: served.metrics()["openinfer_num_requests_waiting"] == 0, "the end of those that have left")
    wake_state = served.ask("POST", "/wake_up")[1]["state"]
    assert wake_state == "paused"
    assert served.ask("POST", "/resume")[1]["state"] == "serving"
    assert served.complete()[0] == 200


def test_wake_that_cannot_read_is_503_and_stays_asleep(served: Served) -> None:
    text = served.said()
    sleep(served, "?level=2")
    away = served.model_dir.with_name("away")
    served.model_dir.rename(away)
    for _ in range(2):
        status, headers, answer = served.ask_whole("POST", "/wake_up")
        assert (status, int(headers["retry-after"]) > 0) == (503, True), answer
        assert served.ask("GET", "/is_sleeping", key=USER)[1] == {"is_sleeping": True}
        assert served.ask("GET", "/health")[1]["state"] == "asleep"
        assert served.complete()[0] == 503
    away.rename(served.model_dir)
    wake(served)
    assert served.said() == text


def test_sleep_that_could_not_keep_the_weights_is_409_and_the_engine_serves_on(tmp_path: Path) -> None:
    with serving(tmp_path, *POOL) as served:
        text = served.said()
        weights = next(served.model_dir.glob("*.safetensors"))
        os.utime(weights, ns=(1, 1))  # another one, for all that is known
        status, answer = served.ask("POST", "/sleep?level=1")
        assert status == 409, answer
        assert "has changed" in answer["error"]["message"]
        assert served.said() == text
        sleep(served, "?level=2")
        wake(served)
        assert served.said() == text


@pytest.mark.parametrize(
    "module", ["openinfer_engine.child", "openinfer_engine.worker.process"], ids=["engine", "rank"]
)
def test_death_asleep_is_told_and_ends_the_server(tmp_path: Path, module: str) -> None:
    served = Served(tmp_path, [*POOL, *TWO_RANKS])
    try:
        (stream,) = asleep_in_flight(served, 1)
        os.kill(served.process_of(module), signal.SIGKILL)
        stream.end()
        assert stream.error is not None
        assert served.process.wait(120) != 0
    finally:
        served.process.kill()
        served.process.wait()
        served.process.stdout.close()


def test_prefixes_that_a_tier_keeps_are_found_again_after_a_sleep(tmp_path: Path) -> None:
    tier = ("--kv-tier", f"disk={tmp_path / 'kv'},64MiB", "--kv-load-timeout-ms", "60000")
    with serving(tmp_path, *POOL, *tier) as served:
        prompt = "The sun is a star. " * 12
        first = served.complete(prompt)[1]
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        for level in (1, 2):
            sleep(served, f"?level={level}")
            wake(served)
            again = served.complete(prompt)[1]
            assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 16
            assert again["choices"][0]["text"] == first["choices"][0]["text"]
