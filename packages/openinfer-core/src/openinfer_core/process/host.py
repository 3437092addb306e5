"""Driving an engine: the loop every host runs, with the ledger, the fault boundary and the health clock in it.

    any thread ──post(Submit | Abort)──► inbox ─► LoopRunner.run ─► EngineLoop.step ─► ledger ─► deliver(events)

An engine implements `EngineLoop`, which knows nothing of threads, sockets or event loops; `InProcessEngine`
runs it in a thread, `engine_process` in a process of its own.
"""

import logging
import queue
import time
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import msgspec

from openinfer_core.control import COMMAND_TIMEOUT_S, ControlCommand
from openinfer_core.engine import EngineInfo, EngineStats
from openinfer_core.errors import PluginFault, Refused
from openinfer_core.events import Failed, FailureKind, TokenEvent
from openinfer_core.ledger import Ledger
from openinfer_core.process.deadlines import Deadlines
from openinfer_core.process.wire import ENDED, Abort, Close, Submit
from openinfer_core.request import GenerateRequest, RequestId

logger = logging.getLogger("openinfer.engine")

_IDLE_LOOK_S = 1.0  # between two looks at a loop without work
# Between two comparisons of the ledger with what the loop has: a request that was lost ends within a second.
_RECONCILE_S = 0.25

Deliver = Callable[[list[TokenEvent]], None]


@dataclass(frozen=True, slots=True)
class ControlCall:
    """A command, and who waits for its answer: None, or why it was not obeyed. Called from the loop's thread."""

    command: ControlCommand
    answer: Callable[[str | None], None]


Command = Submit | Abort | ControlCall | Close


class EngineLoop(Protocol):
    """An engine without a host. All methods but `stats` are called from one thread."""

    @property
    def info(self) -> EngineInfo:
        """What does not change while it lives."""
        ...

    @property
    def busy(self) -> bool:
        """Whether `step` has work, or something to raise."""
        ...

    def submit(self, request: GenerateRequest) -> list[TokenEvent]:
        """Takes a request; its id is not in use. Returns what can be said at once.

        May raise: the request then fails with `INTERNAL`, and `abort` is called in case it was taken in part; but a
        `PluginFault` ends the engine.
        """
        ...

    def abort(self, request_id: RequestId) -> list[TokenEvent]:
        """Ends a request; unknown ids give no event."""
        ...

    def control(self, command: ControlCommand) -> list[TokenEvent]:
        """Obeys a command; returns what that means for requests.

        Raises:
            Refused: it cannot, or not now.
        """
        ...

    def step(self) -> list[TokenEvent]:
        """Runs one iteration; returns its events. May raise only if the engine cannot go on: that ends it."""
        ...

    def reconcile(self, open_ids: AbstractSet[RequestId]) -> list[TokenEvent]:
        """Ends requests that the loop has lost: they have no terminal event, and it does not know them.

        Called between steps, several times a second. May raise as `step` may.

        Args:
            open_ids: all requests without a terminal event.
        """
        ...

    def stats(self) -> EngineStats:
        """A snapshot; called from any thread, also while `step` runs and after `close`. `step_age_s` is the host's."""
        ...

    def close(self) -> None:
        """Frees everything. Idempotent."""
        ...


@runtime_checkable
class DefersControl(Protocol):
    """An `EngineLoop` some of whose commands end in a later step, such as what reads files."""

    def begin_control(self, command: ControlCommand, answer: Callable[[str | None], None]) -> bool:
        """Takes a command that takes time; False if it is one for `control`.

        It is `busy` until it has called `answer`, once and in the loop's thread, also where it is closed before.
        """
        ...


class LoopRunner:
    """Runs an `EngineLoop` until it is closed or dies."""

    def __init__(self, loop: EngineLoop, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.died: BaseException | None = None  # what ended the loop, if it was not `Close`
        self._loop = loop
        self._clock = clock
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._ledger = Ledger()
        self._outbox: list[TokenEvent] = []
        self._closing = False
        self._busy_since_s: float | None = None
        self._obeying_since_s: float | None = None
        self._deadlines = Deadlines()
        self._reconcile_due_s = 0.0
        self._has_ended = False

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._ledger)

    @property
    def reason(self) -> str | None:
        """Why the loop died, where clients may be told."""
        return str(self.died) if isinstance(self.died, PluginFault) else None

    def post(self, command: Command) -> None:
        self._inbox.put(command)
        if self._has_ended:
            self._answer_unheard()

    def stats(self) -> EngineStats:
        """The loop's snapshot with the age of its last iteration; from any thread, also when the loop hangs.

        What a command takes is no age, up to `COMMAND_TIMEOUT_S`: to read weights is no hang.
        """
        return msgspec.structs.replace(self._loop.stats(), step_age_s=self._step_age_s())

    def _step_age_s(self) -> float:
        obeying_since_s, busy_since_s = self._obeying_since_s, self._busy_since_s  # the loop's thread may set them now
        if obeying_since_s is not None:
            return max(0.0, self._clock() - obeying_since_s - COMMAND_TIMEOUT_S)
        return 0.0 if busy_since_s is None else self._clock() - busy_since_s

    def run(self, deliver: Deliver, *, on_end: Callable[[], None] = lambda: None) -> None:
        """Serves commands until `Close`, or until the loop raises: then `died` is set.

        Either way every open request gets `Failed(SHUTDOWN)`, with the name of the plug-in if one was the reason, and
        the loop is closed before this returns. Requests end at their `deadline_s` whatever the loop does. `deliver`
        takes the events of one iteration, never none; it must not raise. `on_end` is where the host tells its clients
        that nothing more comes: before the loop is closed, which takes seconds where KV tiers write to a slow disk.
        """
        try:
            while not self._closing:
                self._iterate()
                self._flush(deliver)
        except BaseException as error:
            self.died = error
            logger.critical("the engine loop failed and ends", exc_info=error)
            if not isinstance(error, Exception):  # KeyboardInterrupt and SystemExit are the host's
                raise
        finally:
            self._busy_since_s = None
            self._end(deliver, on_end)

    def _end(self, deliver: Deliver, on_end: Callable[[], None]) -> None:
        message = "the engine has shut down" if self.died is None else self.reason or "the engine failed"
        try:
            self._outbox += self._ledger.fail_all(FailureKind.SHUTDOWN, message)
            self._flush(deliver)
        finally:
            self._has_ended = True
            self._answer_unheard()
            try:
                on_end()
            finally:
                self._close_loop()

    def _close_loop(self) -> None:
        try:
            self._loop.close()
        except Exception as error:
            self.died = self.died or error
            logger.critical("the engine loop could not be closed", exc_info=error)

    def _flush(self, deliver: Deliver) -> None:
        if self._outbox:
            events, self._outbox = self._outbox, []
            deliver(events)

    def _iterate(self) -> None:
        # Events go to `_outbox` as they are recorded: a step that raises must not take with it what the ledger has let
        # through before.
        if not self._loop.busy:
            self._busy_since_s = None
            try:
                # With requests open and no work, some are lost.
                self._obey(self._inbox.get(timeout=_RECONCILE_S if len(self._ledger) else _IDLE_LOOK_S))
            except queue.Empty:  # a loop may fail between two requests, and is busy then
                if not len(self._ledger):
                    return
        now_s = self._busy_since_s = self._clock()
        while not self._closing:
            try:
                command = self._inbox.get_nowait()
            except queue.Empty:
                break
            self._obey(command)
        if len(self._deadlines) and not self._closing:
            self._end_late(now_s)
        if self._loop.busy and not self._closing:
            self._outbox += self._ledger.record(self._loop.step())
        if now_s >= self._reconcile_due_s and not self._closing:
            self._reconcile_due_s = now_s + _RECONCILE_S
            self._outbox += self._ledger.record(self._loop.reconcile(self._ledger.open_view))

    def _end_late(self, now_s: float) -> None:
        for failure in self._deadlines.take_late(now_s, self._ledger):
            self._outbox += self._ledger.record([failure])
            # The answer is out; what the loop says of the end finds no open request.
            self._outbox += self._ledger.record(self._loop.abort(failure.request_id))

    def _obey(self, command: Command) -> None:
        if isinstance(command, Submit):
            self._submit(command.request)
        elif isinstance(command, Abort):
            if command.request_id in self._ledger:
                self._outbox += self._ledger.record(self._loop.abort(command.request_id))
        elif isinstance(command, ControlCall):
            self._obeying_since_s = self._clock()
            try:
                self._control(command)
            finally:
                # The iteration's age begins anew before the command's ends, so that no look in between sees both.
                self._busy_since_s = self._clock()
                self._obeying_since_s = None
        else:
            self._closing = True

    def _control(self, call: ControlCall) -> None:
        try:
            if isinstance(self._loop, DefersControl) and self._loop.begin_control(call.command, call.answer):
                return
            self._outbox += self._ledger.record(self._loop.control(call.command))
        except Refused as refusal:
            call.answer(str(refusal))
        except PluginFault:
            call.answer(ENDED)
            raise
        except Exception:
            logger.exception("the command %s failed", type(call.command).__name__)
            call.answer("the engine failed at this command; its log says how")
        else:
            call.answer(None)

    def _answer_unheard(self) -> None:
        # What came after the end: nothing waits for ever.
        while True:
            try:
                command = self._inbox.get_nowait()
            except queue.Empty:
                return
            if isinstance(command, ControlCall):
                command.answer(ENDED)

    def _submit(self, request: GenerateRequest) -> None:
        self._ledger.open(request)
        self._deadlines.begin(request, now_s=self._clock(), open_requests=self._ledger)
        try:
            self._outbox += self._ledger.record(self._loop.submit(request))
        except PluginFault:
            raise
        except Exception:
            logger.exception("request %d could not be taken; it fails, the others live", request.request_id)
            failure = Failed(request.request_id, FailureKind.INTERNAL, "the engine could not take this request")
            self._outbox += self._ledger.record([failure])
            self._ledger.record(self._loop.abort(request.request_id))  # it may be half taken
