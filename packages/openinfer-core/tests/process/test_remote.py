"""An engine in a process of its own: it serves, it dies, it is closed, and nothing of it is left."""

import asyncio
import os
import re
import signal
import socket
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from openinfer_core import (
    ContractViolation,
    EngineClosed,
    EngineHandle,
    EngineStats,
    Failed,
    FailureKind,
    Finished,
    FinishReason,
    GenerateRequest,
    InvalidRequest,
    Refused,
    RequestId,
    TokenEvent,
    Tokens,
)
from openinfer_core.process.engine_process import LinkKind
from openinfer_core.process.remote import BROKE_PROTOCOL, DIED, RemoteEngine, spawn_engine
from openinfer_core.process.wire import (
    MAX_FRAME_BYTES,
    AskStats,
    Events,
    StartRefusal,
    Stats,
    Welcome,
    encode_frame,
    to_engine_decoder,
)
from openinfer_core.simulated import SimulatedLoop, SimulatedOptions, simulated_token, spawn_simulated

CHILDREN = Path(__file__).parent / "children"
FOREVER = 10**6
INFO = SimulatedLoop(SimulatedOptions()).info
MakeRequest = Callable[..., GenerateRequest]
RunAsync = Callable[..., Any]


class FaultySpec(msgspec.Struct):
    behaviour: str


@pytest.fixture
def spawn_faulty(monkeypatch: pytest.MonkeyPatch) -> Callable[..., RemoteEngine]:
    monkeypatch.setenv("PYTHONPATH", str(CHILDREN))

    def spawn(behaviour: str, **options: Any) -> RemoteEngine:
        return spawn_engine("faulty_engine", FaultySpec(behaviour), **options)

    return spawn


@pytest.fixture(autouse=True)
def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the engine processes put their sockets."""
    folder = tmp_path / "t"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


async def read_into(seen: list[TokenEvent], handle: EngineHandle) -> None:
    async for events in handle.events():
        seen += events


async def read_until(handle: EngineHandle, done: Callable[[list[TokenEvent]], bool]) -> list[TokenEvent]:
    seen: list[TokenEvent] = []
    async for events in handle.events():
        seen += events
        if done(seen):
            break
    return seen


def ends(events: list[TokenEvent]) -> int:
    return sum(isinstance(event, (Finished, Failed)) for event in events)


def token_ids(events: list[TokenEvent], request_id: int) -> list[int]:
    mine = [event for event in events if isinstance(event, Tokens) and event.request_id == request_id]
    return [token_id for event in mine for token_id in event.token_ids]


@pytest.mark.parametrize("link", list(LinkKind))
def test_engine_process_serves_requests_and_leaves_nothing_when_it_is_closed(
    link: LinkKind, make_request: MakeRequest, run_async: RunAsync, temporary_folder: Path
) -> None:
    options = SimulatedOptions(model="m", num_token_ids=50)
    requests = [make_request(i, prompt=(i + 1,), max_tokens=20) for i in range(30)]

    async def main() -> None:
        handle = spawn_simulated(options, link=link)
        assert isinstance(handle, EngineHandle)
        assert handle.info == SimulatedLoop(options).info
        assert len(os.listdir(temporary_folder)) == (link is LinkKind.UNIX)
        for request in requests[:10]:
            handle.submit(request)  # before anyone iterates
        reader = asyncio.create_task(read_until(handle, lambda events: ends(events) == 30))
        await asyncio.sleep(0)
        for request in requests[10:]:
            handle.submit(request)
        events = await reader
        for request in requests:
            expected = [simulated_token(request, i, options) for i in range(20)]
            assert token_ids(events, request.request_id) == expected
        assert (await handle.stats()).generated_tokens == 600
        await handle.close()

    run_async(main())
    assert list(temporary_folder.iterdir()) == []


@pytest.mark.parametrize("link", list(LinkKind))
def test_engine_process_killed_amid_streams_fails_each_open_request_and_then_raises(
    link: LinkKind, make_request: MakeRequest, run_async: RunAsync, temporary_folder: Path
) -> None:
    async def main() -> None:
        handle = spawn_simulated(SimulatedOptions(tpot_s=0.002), link=link)
        for request_id in range(20):
            handle.submit(make_request(request_id, max_tokens=FOREVER if request_id else 1))
        seen = await read_until(handle, lambda seen: all(token_ids(seen, i) for i in range(20)))
        assert handle.pid is not None
        os.kill(handle.pid, signal.SIGKILL)
        with pytest.raises(EngineClosed, match=DIED):
            await read_into(seen, handle)
        assert [event for event in seen if isinstance(event, Failed)] == [
            Failed(RequestId(request_id), FailureKind.SHUTDOWN, DIED) for request_id in range(1, 20)
        ]
        with pytest.raises(EngineClosed, match=DIED):
            handle.submit(make_request(100))
        with pytest.raises(EngineClosed, match=DIED):
            await handle.stats()
        handle.abort(RequestId(1))
        await handle.close()
        await handle.close()

    run_async(main())
    assert list(temporary_folder.iterdir()) == []


def test_engine_process_killed_before_anyone_reads_fails_what_was_submitted(
    make_request: MakeRequest, run_async: RunAsync
) -> None:
    async def main() -> list[TokenEvent]:
        handle = spawn_simulated(SimulatedOptions())
        handle.submit(make_request(1))
        assert handle.pid is not None
        os.kill(handle.pid, signal.SIGKILL)
        seen: list[TokenEvent] = []
        with pytest.raises(EngineClosed, match=DIED):
            await read_into(seen, handle)
        await handle.close()
        return seen

    assert run_async(main()) == [Failed(RequestId(1), FailureKind.SHUTDOWN, DIED)]


def test_stats_pending_when_the_engine_process_dies_raise(run_async: RunAsync) -> None:
    async def main() -> None:
        handle = spawn_simulated(SimulatedOptions())
        await handle.stats()
        assert handle.pid is not None
        os.kill(handle.pid, signal.SIGSTOP)
        await asyncio.to_thread(os.waitid, os.P_PID, handle.pid, os.WSTOPPED | os.WNOWAIT)  # until it stands still
        pending = [asyncio.create_task(handle.stats()) for _ in range(3)]
        await asyncio.sleep(0)
        pending[1].cancel()
        os.kill(handle.pid, signal.SIGKILL)
        results = await asyncio.gather(*pending, return_exceptions=True)
        assert [type(result) for result in results] == [EngineClosed, asyncio.CancelledError, EngineClosed]
        await handle.close()

    run_async(main())


def test_engine_whose_step_raises_delivers_what_it_said_and_then_dies(
    spawn_faulty: Callable[..., RemoteEngine], make_request: MakeRequest, run_async: RunAsync
) -> None:
    async def main() -> None:
        handle = spawn_faulty("die in a step")
        handle.submit(make_request(1, max_tokens=10))
        seen: list[TokenEvent] = []
        with pytest.raises(EngineClosed, match=DIED):
            await read_into(seen, handle)
        assert len(token_ids(seen, 1)) == 3
        assert seen[-1] == Failed(RequestId(1), FailureKind.SHUTDOWN, "the engine failed")
        await handle.close()

    run_async(main())


def test_clients_are_told_of_a_death_before_the_engine_closes(
    spawn_faulty: Callable[..., RemoteEngine], make_request: MakeRequest, run_async: RunAsync
) -> None:
    async def main() -> None:
        handle = spawn_faulty("die and hang in close", close_deadline_s=0.3)
        handle.submit(make_request(1, max_tokens=10))
        seen: list[TokenEvent] = []
        async with asyncio.timeout(20):
            with pytest.raises(EngineClosed, match=DIED):
                await read_into(seen, handle)
        assert seen[-1] == Failed(RequestId(1), FailureKind.SHUTDOWN, "the engine failed")
        with pytest.raises(EngineClosed, match=DIED):
            handle.submit(make_request(2))
        await handle.close()

    run_async(main())


def test_engine_that_is_closed_has_time_for_its_kv_tiers(
    spawn_faulty: Callable[..., RemoteEngine], tmp_path: Path, run_async: RunAsync
) -> None:
    """Clients are told before the loop is closed, and its standard input ends then: that is not its parent's death."""
    closed = tmp_path / "closed"

    async def main() -> None:
        await spawn_faulty(f"close late {closed}").close()

    run_async(main())
    assert closed.exists()


def test_engine_that_a_plug_in_ended_says_so_over_the_link(
    spawn_faulty: Callable[..., RemoteEngine], make_request: MakeRequest, run_async: RunAsync
) -> None:
    reason = "the scheduler x (mine 1.0) raised KeyError in plan; the engine ends"

    async def main() -> None:
        handle = spawn_faulty("break")
        handle.submit(make_request(1))
        seen: list[TokenEvent] = []
        with pytest.raises(EngineClosed, match=re.escape(reason)):
            await read_into(seen, handle)
        assert seen == [Failed(RequestId(1), FailureKind.SHUTDOWN, reason)]
        with pytest.raises(EngineClosed, match=re.escape(reason)):
            handle.submit(make_request(2))
        with pytest.raises(EngineClosed, match=re.escape(reason)):
            await handle.stats()
        await handle.close()

    run_async(main())


def test_engine_that_hangs_is_killed_when_its_time_to_close_is_over(
    spawn_faulty: Callable[..., RemoteEngine], make_request: MakeRequest, run_async: RunAsync, temporary_folder: Path
) -> None:
    async def main() -> list[TokenEvent]:
        handle = spawn_faulty("hang in a step", close_deadline_s=0.3)
        handle.submit(make_request(1))
        seen: list[TokenEvent] = []
        reader = asyncio.create_task(read_into(seen, handle))
        while (await handle.stats()).step_age_s == 0.0:
            pass  # answered although the loop hangs
        await handle.close()
        await reader
        return seen

    assert run_async(main()) == [Failed(RequestId(1), FailureKind.SHUTDOWN, "the engine has shut down")]
    assert list(temporary_folder.iterdir()) == []


def test_close_before_anyone_reads_then_reading_gives_the_failures_and_the_end(
    make_request: MakeRequest, run_async: RunAsync
) -> None:
    async def main() -> list[TokenEvent]:
        handle = spawn_simulated(SimulatedOptions(ttft_s=3000))
        handle.submit(make_request(1))
        await asyncio.gather(handle.close(), handle.close())
        await handle.close()
        with pytest.raises(EngineClosed, match="was closed"):
            handle.submit(make_request(2))
        with pytest.raises(EngineClosed, match="was closed"):
            await handle.stats()
        seen: list[TokenEvent] = []
        await read_into(seen, handle)
        return seen

    assert run_async(main()) == [Failed(RequestId(1), FailureKind.SHUTDOWN, "the engine has shut down")]


def test_ids_in_use_are_refused_and_aborts_answered(make_request: MakeRequest, run_async: RunAsync) -> None:
    async def main() -> None:
        handle = spawn_simulated(SimulatedOptions(tpot_s=0.001))
        handle.submit(make_request(1, max_tokens=FOREVER))
        with pytest.raises(InvalidRequest, match="request id 1 is in use"):
            handle.submit(make_request(1))
        handle.abort(RequestId(2))
        handle.abort(RequestId(1))
        events = await read_until(handle, lambda events: ends(events) == 1)
        assert isinstance(events[-1], Finished)
        assert events[-1].reason is FinishReason.ABORT
        handle.submit(make_request(1, max_tokens=1))
        await read_until(handle, lambda events: ends(events) == 1)
        await handle.close()

    run_async(main())


def test_signals_for_the_whole_group_do_not_end_the_engine(make_request: MakeRequest, run_async: RunAsync) -> None:
    async def main() -> None:
        handle = spawn_simulated(SimulatedOptions())
        assert handle.pid is not None
        os.kill(handle.pid, signal.SIGINT)
        os.kill(handle.pid, signal.SIGTERM)
        handle.submit(make_request(1))
        events = await read_until(handle, lambda events: ends(events) == 1)
        assert isinstance(events[-1], Finished)
        await handle.close()

    run_async(main())


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts descriptors in /proc")
def test_many_engines_leave_no_descriptors(run_async: RunAsync) -> None:
    async def once(link: LinkKind) -> None:
        handle = spawn_simulated(SimulatedOptions(), link=link)
        await handle.stats()
        await handle.close()

    run_async(once(LinkKind.UNIX))
    before = len(os.listdir("/proc/self/fd"))
    for link in LinkKind:
        run_async(once(link))
    assert len(os.listdir("/proc/self/fd")) == before


def test_handle_used_in_a_second_event_loop_is_a_violation(run_async: RunAsync) -> None:
    async def main() -> None:
        handle = spawn_simulated(SimulatedOptions())
        await handle.stats()

        def elsewhere() -> None:
            with pytest.raises(ContractViolation, match="belongs to the event loop"):
                asyncio.run(handle.stats())

        await asyncio.to_thread(elsewhere)
        await handle.close()

    run_async(main())


def test_handle_made_outside_of_any_event_loop_belongs_to_the_first_that_uses_it(
    make_request: MakeRequest, run_async: RunAsync
) -> None:
    handle = spawn_simulated(SimulatedOptions())
    handle.submit(make_request(1, max_tokens=3))

    async def main() -> list[TokenEvent]:
        events = await read_until(handle, lambda events: ends(events) == 1)
        await handle.close()
        return events

    assert len(token_ids(run_async(main()), 1)) == 3


# Starting


@pytest.mark.parametrize("link", list(LinkKind))
def test_engine_that_cannot_be_built_is_refused_with_its_message(
    spawn_faulty: Callable[..., RemoteEngine], link: LinkKind, temporary_folder: Path
) -> None:
    with pytest.raises(Refused, match="no engine of that kind"):
        spawn_faulty("refuse", link=link)
    assert list(temporary_folder.iterdir()) == []


@pytest.mark.parametrize(
    ("behaviour", "end"), [("crash", "exit code 1"), ("exit", "exit code 3"), ("fault", "killed by SIGSEGV")]
)
def test_engine_process_that_dies_while_it_loads_is_noticed_and_how_it_ended_is_said(
    spawn_faulty: Callable[..., RemoteEngine],
    behaviour: str,
    end: str,
    temporary_folder: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(EngineClosed, match=rf"engine process .* \({end}\)"):
        spawn_faulty(behaviour)
    assert list(temporary_folder.iterdir()) == []
    assert ("Segmentation fault" in capfd.readouterr().err) == (behaviour == "fault")


def test_engine_module_that_is_not_there_is_noticed() -> None:
    with pytest.raises(EngineClosed, match="ended with code 1 before it began to serve"):
        spawn_engine("no_such_engine_module", FaultySpec("x"))


def test_engine_module_that_prints_before_its_address_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(CHILDREN))
    with pytest.raises(ContractViolation, match="said b'Welcome to chatty engine"):
        spawn_engine("chatty_engine", FaultySpec("x"))


def test_engine_process_that_dies_before_it_is_connected_to_is_told_by_how_it_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(CHILDREN))
    with pytest.raises(EngineClosed, match=r"engine process cannot be reached: .* \(exit code 7\)"):
        spawn_engine("brief_engine", FaultySpec("x"))


def test_engine_that_prints_while_it_loads_does_not_break_the_protocol(
    spawn_faulty: Callable[..., RemoteEngine], run_async: RunAsync, capfd: pytest.CaptureFixture[str]
) -> None:
    async def main() -> None:
        handle = spawn_faulty("print")
        assert handle.info.model == "print"
        await handle.close()

    run_async(main())
    assert "this would break the protocol" in capfd.readouterr().err


def test_engine_process_does_not_import_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_async: RunAsync
) -> None:
    (tmp_path / "msgspec.py").write_text("raise SystemExit('imported from the working directory')\n")
    monkeypatch.chdir(tmp_path)

    async def main() -> None:
        await spawn_simulated(SimulatedOptions()).close()

    run_async(main())


def test_log_level_of_no_name_is_refused_and_lower_case_is_one(
    monkeypatch: pytest.MonkeyPatch, run_async: RunAsync
) -> None:
    monkeypatch.setenv("OPENINFER_LOG_LEVEL", "loud")
    with pytest.raises(Refused, match="OPENINFER_LOG_LEVEL is 'loud'; possible are NOTSET, DEBUG"):
        spawn_simulated(SimulatedOptions())
    monkeypatch.setenv("OPENINFER_LOG_LEVEL", "debug")

    async def main() -> None:
        await spawn_simulated(SimulatedOptions()).close()

    run_async(main())


# An engine's end played by the test


def engine_over_a_pair() -> tuple[RemoteEngine, socket.socket]:
    ours, theirs = socket.socketpair()
    theirs.settimeout(30)
    return RemoteEngine(ours, INFO, close_deadline_s=0.05), theirs


@pytest.mark.parametrize(
    "garbage",
    [
        struct.pack("<I", 3) + b"\xc1\xc1\xc1",
        struct.pack("<I", MAX_FRAME_BYTES + 1),
        bytes(encode_frame(Stats(EngineStats()))),
        bytes(encode_frame(Welcome(INFO))),
        bytes(encode_frame(StartRefusal("late"))),
        bytes(encode_frame(AskStats())),
    ],
    ids=["not msgpack", "oversized", "stats unasked", "second welcome", "late refusal", "a client's message"],
)
def test_engine_that_breaks_the_protocol_is_given_up(
    garbage: bytes, make_request: MakeRequest, run_async: RunAsync, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> list[TokenEvent]:
        handle, theirs = engine_over_a_pair()
        with theirs:
            handle.submit(make_request(1))
            theirs.sendall(encode_frame(Events([Tokens(RequestId(1), (5,))])))
            seen = await read_until(handle, lambda events: len(events) == 1)
            theirs.sendall(garbage)
            with pytest.raises(EngineClosed, match=BROKE_PROTOCOL):
                await read_into(seen, handle)
            await handle.close()
            return seen

    assert run_async(main()) == [
        Tokens(RequestId(1), (5,)),
        Failed(RequestId(1), FailureKind.SHUTDOWN, BROKE_PROTOCOL),
    ]
    assert "broke the protocol" in caplog.text


def test_answer_to_a_cancelled_stats_is_not_given_to_the_next(run_async: RunAsync) -> None:
    async def main() -> None:
        handle, theirs = engine_over_a_pair()
        with theirs:
            first = asyncio.create_task(handle.stats())
            second = asyncio.create_task(handle.stats())
            await asyncio.to_thread(theirs.recv, 1)
            first.cancel()
            theirs.sendall(encode_frame(Stats(EngineStats(running=1))) + encode_frame(Stats(EngineStats(running=2))))
            assert (await second).running == 2
            await handle.close()

    run_async(main())


def test_first_uses_at_the_same_time_attach_once(make_request: MakeRequest, run_async: RunAsync) -> None:
    async def main() -> list[TokenEvent]:
        handle, theirs = engine_over_a_pair()
        with theirs:
            handle.submit(make_request(1))
            seen: list[TokenEvent] = []
            reader = asyncio.create_task(read_into(seen, handle))
            stats = asyncio.create_task(handle.stats())
            header = await asyncio.to_thread(theirs.recv, 4, socket.MSG_WAITALL)
            body = await asyncio.to_thread(theirs.recv, struct.unpack("<I", header)[0], socket.MSG_WAITALL)
            assert type(to_engine_decoder.decode(body)).__name__ == "Submit"
            theirs.sendall(encode_frame(Stats(EngineStats(running=1))))
            assert (await stats).running == 1
            await handle.close()
            await reader
            return seen

    assert run_async(main()) == [Failed(RequestId(1), FailureKind.SHUTDOWN, "the engine has shut down")]
