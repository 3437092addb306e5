"""`GrammarGuard`: the engine's side of the guard process, and whose fault it is when that process ends.

asked ──► answered: a grammar that compiles, or what is wrong with it
  ├──► ended by a limit of ours ──► asked again alone in a fresh process ──► again: the client's (`GrammarTooCostly`)
  └──► killed, stalled, not started ──► once more in a fresh process ──► again: of the moment (`Unavailable`)

A fresh process is there already: once a grammar was checked, a spare one is kept, which has seen none.
"""

import contextlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from openinfer_core import Grammar, InvalidRequest, Unavailable

logger = logging.getLogger("openinfer.engine")

CPU_S = 1.0  # processor time that one grammar may take; common ones take 1 to 40 ms
STALL_S = 5.0  # of the clock, after which a process is taken for one that stalls, and another is asked
DEADLINE_S = 20.0  # that the other has, for a machine so busy that processor time hardly passes
MAX_MESSAGE = 300  # characters of llguidance's message that a client is shown
# llguidance's own, below its defaults: a mask of a hostile grammar takes tens of milliseconds, not seconds
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 20_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 200_000,
}
_PROCESS = Path(__file__).with_name("guard_process.py")
_TOO_MUCH = "it is too large, too deep or too slow to check"
# What ends a process that exceeds a limit: of processor time; of the stack, or of memory, which Rust cannot bear.
_BY_A_LIMIT = frozenset({signal.SIGPROF, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT})
_END_GRACE_S = 5.0  # in which a process that closed its pipe ends


class GrammarTooCostly(InvalidRequest):
    """A grammar exceeded a limit of ours, alone in a fresh process; on another day, with other limits, it may not."""


class _Ended(Exception):
    """The guard process did not answer."""

    def __init__(self, why: str, *, by_a_limit: bool = False) -> None:
        super().__init__(why)
        self.by_a_limit = by_a_limit


@dataclass(slots=True)
class _Process:
    """A guard process."""

    popen: subprocess.Popen[bytes]
    is_fresh: bool = True  # it has seen no grammar yet

    is_ready: bool = False  # it has said so

    def pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        stdin, stdout = self.popen.stdin, self.popen.stdout
        if stdin is None or stdout is None:
            raise RuntimeError("the guard process has no pipes")
        return stdin, stdout

    def end(self) -> None:
        self.popen.kill()
        self.popen.wait()
        for pipe in self.pipes():
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def how_it_ended(self) -> _Ended:
        """Of one that has closed its pipe."""
        try:
            code = self.popen.wait(_END_GRACE_S)
        except subprocess.TimeoutExpired:
            return _Ended("it closed its pipe and goes on")
        if code >= 0:
            return _Ended(f"it ended with code {code}")
        return _Ended(f"it was ended by {signal.Signals(-code).name}", by_a_limit=-code in _BY_A_LIMIT)


def start_process() -> subprocess.Popen[bytes]:
    """Raises `OSError` where the system has no room for one."""
    # by its path: only llguidance is loaded; -P: its folder is not on the import path
    return subprocess.Popen(  # noqa: S603 - our own interpreter and file
        [sys.executable, "-P", str(_PROCESS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # Rust's last words about a stack that overflowed
    )


class GrammarGuard:
    """Starts its process when it is first asked; from its first answer on, a spare one waits for its end.

    One thread asks; any may close.

    Attributes:
        num_faults: how often a process was killed, stalled or could not be started.
    """

    def __init__(
        self,
        *,
        cpu_s: float = CPU_S,
        stall_s: float = STALL_S,
        deadline_s: float = DEADLINE_S,
        start: Callable[[], subprocess.Popen[bytes]] = start_process,
    ) -> None:
        self.num_faults = 0
        self._cpu_s = cpu_s
        self._times_s = (stall_s, deadline_s)  # of each try
        self._start = start
        self._is_closed = False
        self._lock = threading.Lock()
        self._process: _Process | None = None
        self._spare: _Process | None = None

    @property
    def pid(self) -> int | None:
        """Of the process that is asked next."""
        process = self._process
        return None if process is None else process.popen.pid

    @property
    def spare_pid(self) -> int | None:
        """Of the one that takes its place."""
        spare = self._spare
        return None if spare is None else spare.popen.pid

    def check(self, grammar: Grammar, head: str | None) -> str:
        """A grammar in llguidance's notation, which compiles within the bounds.

        Args:
            grammar: as it was sent.
            head: Lark that is put before it and refers to it as `@body`.

        Raises:
            InvalidRequest: it is malformed or not supported; as `GrammarTooCostly`, too expensive.
            Unavailable: no process could tell; the same grammar may be asked for again.
        """
        asked = {
            "kind": str(grammar.kind),
            "text": grammar.text,
            "head": head,
            "limits": LIMITS,
            "cpu_s": self._cpu_s,
        }
        answered = json.loads(self._answer(grammar, json.dumps(asked).encode() + b"\n"))
        if "error" in answered:
            raise refused(grammar, answered["error"])
        return answered["grammar"]

    def close(self) -> None:
        """Ends both processes for good: a request that waits for one is refused. Idempotent."""
        with self._lock:
            self._is_closed = True
            spare, self._spare = self._spare, None
        if spare is not None:
            spare.end()
        self._end()

    def _answer(self, grammar: Grammar, line: bytes) -> bytes:
        for place, time_s in enumerate(self._times_s, 1):
            was_fresh, is_last = True, place == len(self._times_s)
            try:
                process = self._ready_process(time_s)
                was_fresh, process.is_fresh = process.is_fresh, False
                answer = self._ask(process, line, time_s)
            except _Ended as end:
                self._end()
                if end.by_a_limit and was_fresh:
                    raise GrammarTooCostly(str(refused(grammar, _TOO_MUCH)), field="grammar") from end
                if not end.by_a_limit:
                    self.num_faults += 1
                    logger.warning("the guard process of grammars: %s%s", end, "" if is_last else "; once more")
                if is_last:
                    raise Unavailable("the process that checks grammars was not there; try again") from end
            else:
                self._keep_spare()
                return answer
        raise AssertionError("the last try returns or raises")

    def _ask(self, process: _Process, line: bytes, time_s: float) -> bytes:
        stdin, stdout = process.pipes()
        deadline_s = time.monotonic() + time_s
        try:
            _write(stdin.fileno(), line, deadline_s)
            reply = _read_line(stdout.fileno(), deadline_s)
        except TimeoutError as error:
            raise _Ended(f"it did not answer within {time_s:g} s") from error
        except (OSError, ValueError):  # it died of the request, or was closed meanwhile
            reply = None
        if reply is None:
            raise process.how_it_ended()
        return reply

    def _ready_process(self, time_s: float) -> _Process:
        if self._process is not None and self._process.popen.poll() is not None:
            self._end()
        with self._lock:
            if self._is_closed:
                raise Unavailable("the engine is closing")
            process = self._process = self._process or self._taken_spare() or self._started()
        if not process.is_ready:
            self._await_ready(process, time_s)
        return process

    def _started(self) -> _Process:
        try:
            return _Process(self._start())
        except OSError as error:
            raise _Ended(f"it cannot be started: {error.strerror}") from error

    def _taken_spare(self) -> _Process | None:
        """The spare process, unless there is none or it has ended."""
        spare, self._spare = self._spare, None
        if spare is not None and spare.popen.poll() is not None:
            spare.end()
            return None
        return spare

    def _await_ready(self, process: _Process, time_s: float) -> None:
        try:
            ready = _read_line(process.pipes()[1].fileno(), time.monotonic() + time_s)
        except (OSError, ValueError):  # TimeoutError among them
            ready = None
        if ready is None:
            raise _Ended(f"it did not start; python -P {_PROCESS} shows why")
        process.is_ready = True

    def _keep_spare(self) -> None:
        """Starts another process, and does not wait for it; where there is no room, the next grammar tries again."""
        with self._lock:
            if self._is_closed or self._spare is not None:
                return
            try:
                self._spare = self._started()
            except _Ended as end:
                logger.info("a spare guard process of grammars: %s", end)

    def _end(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.end()


def refused(grammar: Grammar, why: str) -> InvalidRequest:
    reason = " ".join(why.split())
    if reason.startswith("NoExtensionBias"):  # llguidance's name for a state that nothing leads on from
        reason = "no text fits it; does it refer to itself without end?"
    shown = reason if len(reason) <= MAX_MESSAGE else reason[:MAX_MESSAGE] + "..."
    return InvalidRequest(f"the grammar ({grammar.kind}) cannot be used: {shown}", field="grammar")


def _write(target: int, line: bytes, deadline_s: float) -> None:
    """Raises `TimeoutError`, for a process that does not read, and `BrokenPipeError`."""
    os.set_blocking(target, False)
    left = memoryview(line)
    while left:
        _await(target, select.POLLOUT, deadline_s)
        with contextlib.suppress(BlockingIOError):
            left = left[os.write(target, left) :]


def _read_line(source: int, deadline_s: float) -> bytes | None:
    """None if the other side has closed; raises `TimeoutError`."""
    parts: list[bytes] = []
    while not parts or not parts[-1].endswith(b"\n"):
        _await(source, select.POLLIN, deadline_s)
        data = os.read(source, 2**16)
        if not data:
            return None
        parts.append(data)
    return b"".join(parts)


def _await(descriptor: int, event: int, deadline_s: float) -> None:
    poll = select.poll()  # `select` knows descriptors up to 1023 alone
    poll.register(descriptor, event)
    if not poll.poll(max(0.0, deadline_s - time.monotonic()) * 1000):
        raise TimeoutError
