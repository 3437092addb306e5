"""The host's loop: the ledger and the fault boundary around an engine, and how it ends."""

import logging
import queue
import threading
import time
from collections.abc import Callable
from collections.abc import Set as AbstractSet

import msgspec
import pytest

from openinfer_core import (
    EngineInfo,
    EngineStats,
    Failed,
    FailureKind,
    Finished,
    FinishReason,
    GenerateRequest,
    PluginFault,
    Refused,
    RequestId,
    SamplingParams,
    Scheduled,
    TokenEvent,
    Tokens,
)
from openinfer_core.control import COMMAND_TIMEOUT_S, ControlCommand, FlushCache, Sleep
from openinfer_core.process.deadlines import Deadlines
from openinfer_core.process.host import ControlCall, LoopRunner
from openinfer_core.process.wire import ENDED, Abort, Close, Submit
from openinfer_core.simulated import SimulatedLoop, SimulatedOptions

MakeRequest = Callable[..., GenerateRequest]


class ScriptedLoop:
    """An engine whose `submit`, `step` and `abort` are given; by default a request waits for its abort."""

    info: EngineInfo = SimulatedLoop(SimulatedOptions()).info

    def __init__(self) -> None:
        self.busy = False
        self.closed = 0
        self.aborted: list[RequestId] = []
        self.on_submit: Callable[[GenerateRequest], list[TokenEvent]] = lambda request: []
        self.on_step: Callable[[], list[TokenEvent]] = list
        self.on_reconcile: Callable[[set[RequestId]], list[TokenEvent]] = lambda open_ids: []
        self.on_control: Callable[[ControlCommand], list[TokenEvent]] = lambda command: []
        self.on_close: Callable[[], None] = lambda: None

    def submit(self, request: GenerateRequest) -> list[TokenEvent]:
        return self.on_submit(request)

    def abort(self, request_id: RequestId) -> list[TokenEvent]:
        self.aborted.append(request_id)
        return [Finished(request_id, FinishReason.ABORT, 0, 0, 0)]

    def step(self) -> list[TokenEvent]:
        return self.on_step()

    def control(self, command: ControlCommand) -> list[TokenEvent]:
        return self.on_control(command)

    def reconcile(self, open_ids: AbstractSet[RequestId]) -> list[TokenEvent]:
        return self.on_reconcile(set(open_ids))

    def stats(self) -> EngineStats:
        return EngineStats(running=7)

    def close(self) -> None:
        self.closed += 1
        self.on_close()


def run(loop: ScriptedLoop | SimulatedLoop, *commands: Submit | Abort | Close) -> tuple[LoopRunner, list[TokenEvent]]:
    """Runs a host over commands that are there already; returns what it delivered."""
    host = LoopRunner(loop)
    for command in commands:
        host.post(command)
    delivered: list[TokenEvent] = []
    host.run(delivered.extend)
    return host, delivered


def failing(error: BaseException) -> Callable[..., list[TokenEvent]]:
    def fail(*_: object) -> list[TokenEvent]:
        raise error

    return fail


def test_close_fails_open_requests_and_closes_the_loop(make_request: MakeRequest) -> None:
    loop = ScriptedLoop()
    host, delivered = run(loop, Submit(make_request(1)), Submit(make_request(2)), Close())
    assert delivered == [
        Failed(RequestId(1), FailureKind.SHUTDOWN, "the engine has shut down"),
        Failed(RequestId(2), FailureKind.SHUTDOWN, "the engine has shut down"),
    ]
    assert (loop.closed, host.died) == (1, None)


def test_step_that_raises_ends_the_engine_and_fails_the_open_requests(
    make_request: MakeRequest, caplog: pytest.LogCaptureFixture
) -> None:
    loop = ScriptedLoop()
    loop.busy = True
    error = RuntimeError("device lost")
    loop.on_step = failing(error)
    host, delivered = run(loop, Submit(make_request(1)))
    assert delivered == [Failed(RequestId(1), FailureKind.SHUTDOWN, "the engine failed")]
    assert "device lost" not in delivered[0].message
    assert host.died is error
    assert loop.closed == 1
    assert "device lost" in caplog.text


def test_step_that_raises_takes_nothing_with_it_that_was_said_before(make_request: MakeRequest) -> None:
    loop = ScriptedLoop()
    loop.busy = True
    refused = Failed(RequestId(1), FailureKind.OVERLOADED, "the queue is full")
    loop.on_submit = lambda request: [refused]
    loop.on_step = failing(RuntimeError("device lost"))
    _, delivered = run(loop, Submit(make_request(1)))
    assert delivered == [refused]


def test_submit_that_raises_fails_that_request_alone(
    make_request: MakeRequest, caplog: pytest.LogCaptureFixture
) -> None:
    loop = ScriptedLoop()

    def submit(request: GenerateRequest) -> list[TokenEvent]:
        if request.request_id == 1:
            raise KeyError("secret detail of a plug-in")
        return [Scheduled(request.request_id, 0, 0.0), Finished(request.request_id, FinishReason.LENGTH, 0, 0, 0)]

    loop.on_submit = submit
    host, delivered = run(loop, Submit(make_request(1)), Submit(make_request(2)), Close())
    assert delivered[0] == Failed(RequestId(1), FailureKind.INTERNAL, "the engine could not take this request")
    assert delivered[2] == Finished(RequestId(2), FinishReason.LENGTH, 3, 0, 0)
    assert len(delivered) == 3
    assert loop.aborted == [1]  # whatever was taken of it is given back
    assert host.died is None
    assert "secret detail" in caplog.text


def test_close_that_raises_is_logged_and_counts_as_a_death(
    make_request: MakeRequest, caplog: pytest.LogCaptureFixture
) -> None:
    loop = ScriptedLoop()
    error = RuntimeError("could not free")
    loop.on_close = failing(error)  # type: ignore[assignment]
    host, delivered = run(loop, Submit(make_request(1)), Close())
    assert len(delivered) == 1
    assert host.died is error
    assert "could not free" in caplog.text


def test_exit_raised_by_a_plugin_ends_the_engine_and_goes_on(
    make_request: MakeRequest, caplog: pytest.LogCaptureFixture
) -> None:
    loop = ScriptedLoop()
    loop.busy = True
    loop.on_step = failing(SystemExit(3))
    host = LoopRunner(loop)
    host.post(Submit(make_request(1)))
    delivered: list[TokenEvent] = []
    with pytest.raises(SystemExit):
        host.run(delivered.extend)
    assert [type(event) for event in delivered] == [Failed]
    assert isinstance(host.died, SystemExit)
    assert loop.closed == 1


def test_loop_is_closed_also_when_deliver_raises(make_request: MakeRequest, caplog: pytest.LogCaptureFixture) -> None:
    loop = ScriptedLoop()
    host = LoopRunner(loop)
    host.post(Submit(make_request(1)))
    host.post(Close())
    with pytest.raises(OSError, match="no one there"):
        host.run(failing(OSError("no one there")))  # type: ignore[arg-type]
    assert loop.closed == 1


def test_end_is_told_after_the_last_events_and_before_the_loop_is_closed(make_request: MakeRequest) -> None:
    loop, order = ScriptedLoop(), []
    loop.on_close = lambda: order.append("closed")
    host = LoopRunner(loop)
    host.post(Submit(make_request(1)))
    host.post(Close())
    host.run(lambda _: order.append("events"), on_end=lambda: order.append("told"))
    assert order == ["events", "told", "closed"]


def test_loop_is_closed_also_when_clients_cannot_be_told() -> None:
    loop = ScriptedLoop()
    host = LoopRunner(loop)
    host.post(Close())
    with pytest.raises(OSError, match="no one there"):
        host.run(lambda _: None, on_end=failing(OSError("no one there")))  # type: ignore[arg-type]
    assert loop.closed == 1


def test_abort_of_unknown_and_ended_requests_never_reaches_the_loop(make_request: MakeRequest) -> None:
    loop = ScriptedLoop()
    _, delivered = run(
        loop, Abort(RequestId(9)), Submit(make_request(1)), Abort(RequestId(1)), Abort(RequestId(1)), Close()
    )
    assert delivered == [Finished(RequestId(1), FinishReason.ABORT, 3, 0, 0)]
    assert loop.aborted == [1]


def test_events_of_a_step_come_together_and_none_are_delivered_empty(make_request: MakeRequest) -> None:
    host = LoopRunner(SimulatedLoop(SimulatedOptions()))
    batches: list[list[TokenEvent]] = []

    def deliver(events: list[TokenEvent]) -> None:
        batches.append(events)
        if sum(isinstance(event, Finished) for batch in batches for event in batch) == 2:
            host.post(Close())

    host.post(Submit(make_request(1, max_tokens=2)))
    host.post(Submit(make_request(2, max_tokens=2)))
    host.run(deliver)
    kinds = [[(event.request_id, type(event)) for event in batch] for batch in batches]
    assert kinds == [
        [(1, Scheduled), (1, Tokens), (2, Scheduled), (2, Tokens)],
        [(1, Tokens), (1, Finished), (2, Tokens), (2, Finished)],
    ]


def test_stats_give_the_age_of_the_iteration_while_there_is_work_also_when_it_hangs(make_request: MakeRequest) -> None:
    now_s = [100.0]
    entered, release = threading.Event(), threading.Event()
    loop = ScriptedLoop()

    def step() -> list[TokenEvent]:
        entered.set()
        assert release.wait(30)
        loop.busy = False
        return [Finished(RequestId(1), FinishReason.LENGTH, 0, 0, 0)]

    def submit(request: GenerateRequest) -> list[TokenEvent]:
        loop.busy = True
        return []

    loop.on_step, loop.on_submit = step, submit
    host = LoopRunner(loop, clock=lambda: now_s[0])
    assert host.stats() == EngineStats(running=7, step_age_s=0.0)
    delivered: queue.SimpleQueue[list[TokenEvent]] = queue.SimpleQueue()
    thread = threading.Thread(target=host.run, args=(delivered.put,))
    thread.start()
    host.post(Submit(make_request(1)))
    assert entered.wait(30)
    now_s[0] = 107.5
    assert host.stats().step_age_s == 7.5
    release.set()
    delivered.get(timeout=30)
    host.post(Close())
    thread.join()
    assert host.stats().step_age_s == 0.0


@pytest.mark.parametrize("was_busy", [False, True])
def test_command_that_takes_long_is_no_hang_until_no_command_takes_so_long(
    make_request: MakeRequest, *, was_busy: bool
) -> None:
    """An update that read weights for a minute under traffic made `/health` 503, and an orchestrator end the server."""
    now_s = [100.0]
    entered, release = threading.Event(), threading.Event()
    loop = ScriptedLoop()

    def obey(command: ControlCommand) -> list[TokenEvent]:
        entered.set()
        assert release.wait(30)
        return []

    loop.busy, loop.on_control = was_busy, obey
    host = LoopRunner(loop, clock=lambda: now_s[0])
    thread = threading.Thread(target=host.run, args=(lambda events: None,))
    thread.start()
    answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    host.post(ControlCall(Sleep(), answers.put))
    assert entered.wait(30)
    ages = []
    for now_s[0] in (100.0 + COMMAND_TIMEOUT_S, 107.5 + COMMAND_TIMEOUT_S):
        ages.append(host.stats().step_age_s)
    release.set()
    answer = answers.get(timeout=30)
    host.post(Close())
    thread.join()
    assert answer is None
    assert ages == [0.0, 7.5]


def test_duplicate_id_ends_the_engine_because_the_handles_before_it_refuse_one(
    make_request: MakeRequest, caplog: pytest.LogCaptureFixture
) -> None:
    loop = ScriptedLoop()
    host, delivered = run(loop, Submit(make_request(1)), Submit(make_request(1)))
    assert len(delivered) == 1
    assert "request id 1 is in use" in str(host.died)


@pytest.fixture(autouse=True)
def _log_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


# --- lost requests, deadlines, plug-ins that end the engine ---------------------------------------------------


def test_request_that_the_loop_lost_ends_within_a_second(make_request: MakeRequest) -> None:
    loop = ScriptedLoop()  # it never has work, whatever was submitted
    lost = Failed(RequestId(1), FailureKind.INTERNAL, "lost by the scheduler x")
    host = LoopRunner(loop)
    loop.on_reconcile = lambda open_ids: [lost] if open_ids else []
    delivered: list[TokenEvent] = []

    def deliver(events: list[TokenEvent]) -> None:
        delivered.extend(events)
        host.post(Close())

    host.post(Submit(make_request(1)))
    begin_s = time.monotonic()
    host.run(deliver)
    assert delivered == [lost]
    assert time.monotonic() - begin_s < 1.0
    assert host.died is None


def test_open_requests_alone_are_reconciled(make_request: MakeRequest) -> None:
    loop = ScriptedLoop()
    seen: list[set[RequestId]] = []
    ended = Finished(RequestId(1), FinishReason.LENGTH, 3, 0, 0)
    loop.on_submit = lambda request: [ended] if request.request_id == 1 else []

    def reconcile(open_ids: set[RequestId]) -> list[TokenEvent]:
        seen.append(open_ids)
        host.post(Close())
        return []

    loop.on_reconcile = reconcile
    host = LoopRunner(loop)
    host.post(Submit(make_request(1)))
    host.post(Submit(make_request(2)))
    host.run(lambda events: None)
    assert seen == [{RequestId(2)}]


def run_until_close(loop: ScriptedLoop, *requests: GenerateRequest, now_s: list[float]) -> list[TokenEvent]:
    """Each step takes a second; closes when no request is open."""
    host = LoopRunner(loop, clock=lambda: now_s[0])
    delivered: list[TokenEvent] = []

    def step() -> list[TokenEvent]:
        now_s[0] += 1.0
        return []

    def reconcile(open_ids: set[RequestId]) -> list[TokenEvent]:
        if not open_ids:
            host.post(Close())
        return []

    loop.busy = True
    loop.on_step, loop.on_reconcile = step, reconcile
    for request in requests:
        host.post(Submit(request))
    host.run(delivered.extend)
    return delivered


def test_deadline_ends_a_request_whatever_the_loop_does(make_request: MakeRequest) -> None:
    loop, now_s = ScriptedLoop(), [100.0]
    late = msgspec.structs.replace(make_request(1), deadline_s=4.5)
    later = msgspec.structs.replace(make_request(2), deadline_s=7.0)
    delivered = run_until_close(loop, later, late, now_s=now_s)
    assert delivered == [
        Failed(RequestId(1), FailureKind.DEADLINE, "the request was not done within its deadline_s of 4.5"),
        Failed(RequestId(2), FailureKind.DEADLINE, "the request was not done within its deadline_s of 7"),
    ]
    assert loop.aborted == [1, 2]
    assert 107.0 <= now_s[0] < 110.0


def test_deadline_of_an_ended_request_ends_no_other_with_its_id() -> None:
    deadlines = Deadlines()
    request = GenerateRequest(
        request_id=RequestId(1), prompt_token_ids=(1,), sampling=SamplingParams(max_tokens=1), deadline_s=5.0
    )
    open_requests = {RequestId(1)}
    deadlines.begin(request, now_s=0.0, open_requests=open_requests)
    # It ends, and its id comes again: once without a deadline, once with a later one.
    without = msgspec.structs.replace(request, deadline_s=None)
    deadlines.begin(without, now_s=1.0, open_requests=open_requests)
    assert list(deadlines.take_late(10.0, open_requests)) == []
    deadlines.begin(request, now_s=20.0, open_requests=open_requests)
    deadlines.begin(request, now_s=22.0, open_requests=open_requests)
    assert list(deadlines.take_late(26.0, open_requests)) == []
    assert [failure.request_id for failure in deadlines.take_late(27.0, open_requests)] == [1]
    assert list(deadlines.take_late(99.0, open_requests)) == []


def test_deadlines_of_ended_requests_take_no_memory() -> None:
    deadlines, sampling = Deadlines(), SamplingParams(max_tokens=1)
    for index in range(5000):
        request = GenerateRequest(
            request_id=RequestId(index), prompt_token_ids=(1,), sampling=sampling, deadline_s=3600.0
        )
        deadlines.begin(request, now_s=float(index), open_requests={RequestId(index), RequestId(0)})
    assert len(deadlines) < 200
    assert [failure.request_id for failure in deadlines.take_late(1e9, {RequestId(0), RequestId(4999)})] == [0, 4999]


@pytest.mark.parametrize("where", ["on_submit", "on_step", "on_reconcile"])
def test_plug_in_that_breaks_its_contract_is_named_to_every_request(
    make_request: MakeRequest, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    loop = ScriptedLoop()
    loop.busy = True
    fault = PluginFault("the scheduler x (mine 1.0) raised ValueError in plan; the engine ends")
    setattr(loop, where, failing(fault))
    host, delivered = run(loop, Submit(make_request(1)))
    assert delivered == [Failed(RequestId(1), FailureKind.SHUTDOWN, str(fault))]
    assert (host.died, host.reason) == (fault, str(fault))
    assert "x (mine 1.0)" in caplog.text
    assert loop.closed == 1


def test_command_is_obeyed_and_answered() -> None:
    loop, obeyed, answers = ScriptedLoop(), list[ControlCommand](), list[str | None]()
    loop.on_control = lambda command: obeyed.append(command) or []
    host = LoopRunner(loop)
    host.post(ControlCall(FlushCache(), answers.append))
    host.post(Close())
    host.run(lambda events: None)
    assert (obeyed, answers) == ([FlushCache()], [None])


def test_command_that_is_refused_or_fails_is_answered_and_the_engine_lives(caplog: pytest.LogCaptureFixture) -> None:
    loop, answers = ScriptedLoop(), list[str | None]()

    def control(command: ControlCommand) -> list[TokenEvent]:
        raise Refused("not now") if isinstance(command, Sleep) else ZeroDivisionError

    loop.on_control = control
    host = LoopRunner(loop)
    for command in (Sleep(), FlushCache()):
        host.post(ControlCall(command, answers.append))
    host.post(Close())
    with caplog.at_level(logging.CRITICAL + 1):
        host.run(lambda events: None)
    assert answers == ["not now", "the engine failed at this command; its log says how"]
    assert host.died is None


def test_command_after_the_end_is_answered() -> None:
    answers: list[str | None] = []
    host = LoopRunner(ScriptedLoop())
    host.post(Close())
    host.post(ControlCall(FlushCache(), answers.append))
    host.run(lambda events: None)
    host.post(ControlCall(FlushCache(), answers.append))
    assert answers == [ENDED, ENDED]
