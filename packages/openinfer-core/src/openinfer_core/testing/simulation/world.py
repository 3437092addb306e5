"""`World`: tasks in place of threads, one of which runs at a time, in an order that the seed chooses.

    task ──park──► waiting ──wake, or its time comes──► ready ──(drawn by the seed)──► runs

Time stands still while anything can run, and then jumps to the next that waits for it; what computing costs is charged
(`charge`). Nothing is imported from openinfer here: the world exists before any module of it is loaded (`child.py`).
"""

import hashlib
import heapq
import itertools
import random
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import greenlet

_SWITCH_RATE = 1 / 16  # of the places where a thread might be interrupted, those where it is
_KEPT_LINES = 2000
_CALL = -1  # in place of a ticket


class Stuck(AssertionError):
    """Nothing can run, and nothing will: every task waits for another."""


class TaskContext(Protocol):
    """What belongs to the running thread of a real process and has to change hands with the task."""

    def leave(self) -> Any:
        """Takes the running task's share away, and returns it; None if it has none."""
        ...

    def enter(self, share: Any) -> None: ...


class Process:
    """A process of the world: its tasks, and what it has open. `processes.py` starts and ends them.

    Attributes:
        pid: one that no other has.
        name: of its program.
        exit_code: once it has ended; a signal's is negative.
        tasks: by number.
        ends: of sockets and pipes that it has open, by descriptor.
        descriptor_limit: of `ends`.
        at_end: called when it has ended, in the order in which they were added.
        handlers: of signals.
        notes: what a scenario keeps with it.
    """

    def __init__(self, pid: int, name: str) -> None:
        self.pid = pid
        self.name = name
        self.exit_code: int | None = None
        self.tasks: dict[int, Task] = {}
        self.ends: dict[int, Any] = {}
        self.descriptor_limit = 1 << 20
        self.at_end: list[Callable[[], None]] = []
        self.handlers: dict[int, Any] = {}
        self.main_thread: Any = None
        self.notes: dict[str, Any] = {}

    @property
    def has_ended(self) -> bool:
        return self.exit_code is not None


class Task:
    """A thread of the world, of a process."""

    __slots__ = ("daemon", "greenlet", "ident", "is_parked", "name", "process", "ticket", "was_woken")

    def __init__(self, name: str, ident: int, process: Process, *, daemon: bool) -> None:
        self.name = name
        self.ident = ident
        self.process = process
        self.daemon = daemon
        self.greenlet: Any = None
        self.is_parked = False
        self.was_woken = False
        self.ticket = 0  # of the last wait: a timer of an earlier one is void


class World:
    """Runs tasks until the first one ends.

    Args:
        seed: of every choice.
        wall_s: what `time.time` begins with, in seconds since 1970.

    Attributes:
        now_s: virtual seconds since the beginning.
        wall_offset_s: wall clock less `now_s`; changing it is a step of the wall clock.
        random: for choices; what draws from it in another order is another run.
        network: `sockets.Network`, once it is installed.
        processes: `processes.Processes`, once they are.
    """

    def __init__(self, seed: int, *, wall_s: float = 1_800_000_000.0) -> None:
        self.seed = seed
        self.now_s = 0.0
        self.wall_offset_s = wall_s
        self.random = random.Random(seed)  # noqa: S311 - no secrets here
        self.network: Any = None
        self.processes: Any = None
        self.num_switches = 0
        self.lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self.contexts: list[TaskContext] = []
        self._digest = hashlib.blake2b(digest_size=16)
        # Its draws leave those of `random` as they are.
        self._scheduling = random.Random(seed ^ 0x5DEECE66D)  # noqa: S311
        self._numbers = itertools.count(1)
        self.outside = Process(1, "outside")  # what is of no process that can end
        self.is_interruptible = True  # while not, `maybe_switch` does nothing
        self._ready: list[Task] = []
        self._timers: list[tuple[float, int, Task | Callable[[], None], int]] = []
        self._tasks: dict[int, Task] = {}
        self._current: Task | None = None
        self._failure: BaseException | None = None
        self._hub: Any = None

    # --- journal ----------------------------------------------------------------------------------------

    def note(self, *words: object) -> None:
        """Writes a line of the journal, whose digest names the run."""
        line = f"{self.now_s:.9f} {' '.join(map(str, words))}"
        self._digest.update(line.encode() + b"\n")
        self.lines.append(line)

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    # --- tasks ------------------------------------------------------------------------------------------

    @property
    def current(self) -> Task | None:
        """The task that runs; None before the first one."""
        return self._current

    @property
    def process(self) -> Process:
        """The process of the task that runs."""
        return self.outside if self._current is None else self._current.process

    def next_number(self) -> int:
        """One that was not given before."""
        return next(self._numbers)

    def run(self, main: Callable[[], Any]) -> Any:
        """Runs `main` as the first task and everything that it starts; returns its result when it ends.

        Raises:
            Stuck: it can never end.
        """
        self._hub = greenlet.getcurrent()
        result: list[Any] = []
        first = self.spawn(lambda: result.append(main()), name="main")
        while not first.greenlet.dead:
            self._resume(self._next())
            if self._failure is not None:
                raise self._failure
        return result[0]

    def spawn(
        self, function: Callable[[], object], *, name: str, daemon: bool = False, process: Process | None = None
    ) -> Task:
        """Makes a task that is ready to run, of the running one's process or another; the running one goes on."""
        owner = process or self.process
        task = Task(name, next(self._numbers), owner, daemon=daemon)
        owner.tasks[task.ident] = task
        task.greenlet = greenlet.greenlet(lambda: self._run_task(task, function), parent=self._hub)
        self._tasks[task.ident] = task
        self._ready.append(task)
        return task

    def park(self, timeout_s: float | None = None) -> bool:
        """Lets others run until one of them wakes the running task, or time is over; returns whether it was woken."""
        task = self._current
        if task is None:
            raise Stuck("only a task of the world can wait")
        if task.process.exit_code is not None:
            raise greenlet.GreenletExit
        task.is_parked, task.was_woken = True, False
        task.ticket += 1
        if timeout_s is not None:
            due_s = self.now_s + timeout_s if timeout_s > 0 else self.now_s
            heapq.heappush(self._timers, (due_s, next(self._numbers), task, task.ticket))
        self._leave()
        return task.was_woken

    def wake(self, task: Task) -> None:
        """Makes a parked task ready; of no effect on any other."""
        if task.is_parked:
            task.is_parked, task.was_woken = False, True
            self._ready.append(task)

    def call_at(self, due_s: float, call: Callable[[], None]) -> None:
        """Calls something at a time, which must not wait; it is of no task."""
        heapq.heappush(self._timers, (due_s, next(self._numbers), call, _CALL))

    def end(self, process: Process, exit_code: int) -> None:
        """Ends a process, before time goes on: no task of it goes on, but that each leaves its `try` blocks.

        What these do changes nothing any more: nothing that waits goes on, and what the process had open is closed.
        """
        if self._current is not None:
            self.call_at(self.now_s, lambda: self.end(process, exit_code))
            return
        if process.has_ended:
            return
        process.exit_code = exit_code
        for call in process.at_end:
            call()
        self._ready = [task for task in self._ready if task.process is not process]
        for task in [*process.tasks.values()]:
            task.is_parked = False
            self._current = task
            task.greenlet.throw()
            self._current = None
            self._forget(task)  # one that had not begun has left no blocks

    def end_own(self, exit_code: int) -> None:
        """Ends the process of the running task, which does not go on."""
        self.end(self.process, exit_code)
        while True:
            self.park()

    def sleep(self, duration_s: float) -> None:
        """The running task does nothing for so long; nothing cuts it short."""
        due_s = self.now_s + duration_s
        if self.process.exit_code is not None:
            raise greenlet.GreenletExit
        if self._is_alone_until(due_s):
            self.now_s = due_s
            return
        self.park(duration_s)
        while self.now_s < due_s:
            self.park(due_s - self.now_s)

    def charge(self, duration_s: float) -> None:
        """The running task computes for so long; others run meanwhile, as on another processor."""
        if duration_s > 0 and self._current is not None:
            self.sleep(duration_s)

    def maybe_switch(self) -> None:
        """A place where a thread might be interrupted: the seed says whether it is."""
        if (
            self._ready
            and self._current is not None
            and self.is_interruptible
            and not self._current.process.has_ended
            and self._scheduling.random() < _SWITCH_RATE
        ):
            self._ready.append(self._current)
            self._leave()

    def yield_to_others(self) -> None:
        """Lets everything run that is ready, once."""
        if self.process.has_ended:
            raise greenlet.GreenletExit
        if self._current is not None and self._ready:
            self._ready.append(self._current)
            self._leave()

    def stacks(self) -> str:
        """Where every task stands."""
        parts: list[str] = []
        for task in self._tasks.values():
            frame = task.greenlet.gr_frame
            where = "".join(traceback.format_stack(frame)[-4:]) if frame is not None else "  runs\n"
            parts.append(f"--- {task.name}{' (daemon)' if task.daemon else ''}\n{where}")
        return "".join(parts)

    def _is_alone_until(self, due_s: float) -> bool:
        """Whether no other task can run before then, so that switching to the hub and back would change nothing."""
        return self._current is not None and not self._ready and not (self._timers and self._timers[0][0] <= due_s)

    def _run_task(self, task: Task, function: Callable[[], object]) -> None:
        try:
            function()
        except greenlet.GreenletExit:
            raise
        except BaseException as error:  # noqa: BLE001 -- it goes on in `run`, whose caller sees it
            if not task.process.has_ended:  # what leaves its blocks in a process that is gone may fail as it likes
                self._failure = self._failure or error
        finally:
            self._forget(task)

    def _forget(self, task: Task) -> None:
        self._tasks.pop(task.ident, None)
        task.process.tasks.pop(task.ident, None)

    def _leave(self) -> None:
        """The running task goes on when it is drawn: straight from the one before it, where it need not be told to."""
        following = self._next_without_calls()
        if following is not None and following is self._current:
            return  # it was drawn itself, and keeps what it shares
        contexts = self.contexts
        shares = [context.leave() for context in contexts]
        if following is None:
            self._hub.switch()
        else:
            self.num_switches += 1
            self._current = following
            following.greenlet.switch()
        for index, share in enumerate(shares):
            if share is not None:
                contexts[index].enter(share)

    def _resume(self, task: Task) -> None:
        self.num_switches += 1
        self._current = task
        task.greenlet.switch()
        self._current = None

    def _next_without_calls(self) -> Task | None:
        """The next one to run; None if something is to be called first, which only the hub may do."""
        ready, timers = self._ready, self._timers
        while not ready:
            if not timers or not isinstance(timers[0][2], Task):
                return None
            due_s, _, task, ticket = heapq.heappop(timers)
            if task.is_parked and task.ticket == ticket:  # type: ignore[union-attr] # looked at before
                self.now_s = max(self.now_s, due_s)
                task.is_parked = False  # type: ignore[union-attr]
                return task  # type: ignore[return-value]
        if len(ready) == 1:
            return ready.pop()
        return self._draw()

    def _draw(self) -> Task:
        """One of those that are ready."""
        ready = self._ready
        index = self._scheduling.randrange(len(ready)) if len(ready) > 1 else 0
        # The last one takes the place of the one that is drawn: the order is drawn anyway.
        ready[index], ready[-1] = ready[-1], ready[index]
        return ready.pop()

    def _next(self) -> Task:
        while not self._ready:
            if not self._timers:
                raise Stuck(f"no task can go on:\n{self.stacks()}")
            due_s, _, task, ticket = heapq.heappop(self._timers)
            if not isinstance(task, Task):
                self.now_s = max(self.now_s, due_s)
                task()
            elif task.is_parked and task.ticket == ticket:
                self.now_s = max(self.now_s, due_s)
                task.is_parked = False
                self._ready.append(task)
        return self._draw()
