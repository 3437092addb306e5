"""Driving an engine: the loop every host runs, with the ledger, the fence and the health clock in it.

    any thread ──post(Submit | Abort)──► inbox ─► EngineHost.run ─► EngineLoop.step ─► ledger ─► deliver(events)

An engine implements `EngineLoop`, which knows nothing of threads, sockets or event loops; `InProcessEngine`
runs it in a thread, `engine_process` in a process of its own.
"""

import logging
import queue
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from openinfer_core.engine import EngineInfo, EngineStats
from openinfer_core.events import FailureKind, TokenEvent
from openinfer_core.ledger import Ledger
from openinfer_core.request import GenerateRequest, RequestId
from openinfer_core.wire import Abort, Close, Submit

logger = logging.getLogger("openinfer.engine")

Deliver = Callable[[list[TokenEvent]], None]
Command = Submit | Abort | Close


class EngineLoop(Protocol):
    """An engine without a host. All methods but `stats` are called from one thread."""

    @property
    def info(self) -> EngineInfo:
        """What does not change while it lives."""
        ...

    @property
    def busy(self) -> bool:
        """Whether `step` has work."""
        ...

    def submit(self, request: GenerateRequest) -> list[TokenEvent]:
        """Takes a request; its id is not in use. Returns what can be said at once."""
        ...

    def abort(self, request_id: RequestId) -> list[TokenEvent]:
        """Ends a request; unknown ids give no event."""
        ...

    def step(self) -> list[TokenEvent]:
        """Runs one iteration; returns its events. May raise only if the engine cannot go on."""
        ...

    def stats(self) -> EngineStats:
        """A snapshot; called from any thread, also while `step` runs. `step_age_s` is the host's."""
        ...

    def close(self) -> None:
        """Frees everything. Idempotent."""
        ...


class EngineHost:
    """Runs an `EngineLoop` until it is closed or dies."""

    def __init__(self, loop: EngineLoop, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.died: BaseException | None = None
        """What ended the loop, if it was not `Close`."""
        self._loop = loop
        self._clock = clock
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._ledger = Ledger()
        self._closing = False
        self._busy_since_s: float | None = None

    def post(self, command: Command) -> None:
        """Hands a command to the loop, from any thread."""
        self._inbox.put(command)

    def stats(self) -> EngineStats:
        """The loop's snapshot with the age of its last iteration; from any thread, also when the loop hangs."""
        busy_since_s = self._busy_since_s
        age_s = 0.0 if busy_since_s is None else self._clock() - busy_since_s
        return msgspec.structs.replace(self._loop.stats(), step_age_s=age_s)

    def run(self, deliver: Deliver) -> None:
        """Serves commands until `Close`, or until the loop raises: then `died` is set.

        Either way every open request gets `Failed(SHUTDOWN)` and the loop is closed before this returns.
        """
        try:
            while not self._closing:
                events = self._iterate()
                if events:
                    deliver(events)
        except Exception as error:
            self.died = error
            logger.critical("the engine loop failed and ends", exc_info=error)
        finally:
            self._busy_since_s = None
            deliver(self._ledger.fail_all(FailureKind.SHUTDOWN, "the engine has shut down"))
            self._loop.close()

    def _iterate(self) -> list[TokenEvent]:
        if not self._loop.busy:
            self._busy_since_s = None
            events = self._obey(self._inbox.get())
        else:
            events = []
        self._busy_since_s = self._clock()
        while not self._closing:
            try:
                command = self._inbox.get_nowait()
            except queue.Empty:
                break
            events += self._obey(command)
        if self._loop.busy and not self._closing:
            events += self._ledger.record(self._loop.step())
        return events

    def _obey(self, command: Command) -> list[TokenEvent]:
        if isinstance(command, Submit):
            self._ledger.open(command.request)
            return self._ledger.record(self._loop.submit(command.request))
        if isinstance(command, Abort):
            known = command.request_id in self._ledger
            return self._ledger.record(self._loop.abort(command.request_id)) if known else []
        self._closing = True
        return []
