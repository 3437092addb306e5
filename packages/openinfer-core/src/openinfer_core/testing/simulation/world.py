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


class Stuck(AssertionError):
    """Nothing can run, and nothing will: every task waits for another."""


class TaskContext(Protocol):
    """What belongs to the running thread of a real process and has to change hands with the task."""

    def leave(self) -> Any:
        """Takes the running task's share away, and returns it."""
        ...

    def enter(self, share: Any) -> None: ...


class Task:
    """A thread of the world."""

    __slots__ = ("daemon", "greenlet", "ident", "is_parked", "name", "ticket", "was_woken")

    def __init__(self, name: str, ident: int, *, daemon: bool) -> None:
        self.name = name
        self.ident = ident
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
    """

    def __init__(self, seed: int, *, wall_s: float = 1_800_000_000.0) -> None:
        self.seed = seed
        self.now_s = 0.0
        self.wall_offset_s = wall_s
        self.random = random.Random(seed)  # noqa: S311 - no secrets here
        self.num_switches = 0
        self.lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self.contexts: list[TaskContext] = []
        self._digest = hashlib.blake2b(digest_size=16)
        # Its draws leave those of `random` as they are.
        self._scheduling = random.Random(seed ^ 0x5DEECE66D)  # noqa: S311
        self._numbers = itertools.count(1)
        self._ready: list[Task] = []
        self._timers: list[tuple[float, int, Task, int]] = []
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

    def spawn(self, function: Callable[[], object], *, name: str, daemon: bool = False) -> Task:
        """Makes a task that is ready to run; it does not run before the running one waits."""
        task = Task(name, next(self._numbers), daemon=daemon)
        task.greenlet = greenlet.greenlet(lambda: self._run_task(task, function), parent=self._hub)
        self._tasks[task.ident] = task
        self._ready.append(task)
        return task

    def park(self, timeout_s: float | None = None) -> bool:
        """Lets others run until one of them wakes the running task, or time is over; returns whether it was woken."""
        task = self._require_current()
        task.is_parked, task.was_woken = True, False
        task.ticket += 1
        if timeout_s is not None:
            due_s = self.now_s + max(0.0, timeout_s)
            heapq.heappush(self._timers, (due_s, next(self._numbers), task, task.ticket))
        self._leave()
        return task.was_woken

    def wake(self, task: Task) -> None:
        """Makes a parked task ready; of no effect on any other."""
        if task.is_parked:
            task.is_parked, task.was_woken = False, True
            self._ready.append(task)

    def sleep(self, duration_s: float) -> None:
        """The running task does nothing for so long; nothing cuts it short."""
        due_s = self.now_s + duration_s
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
        if self._current is not None and self._ready and self._scheduling.random() < _SWITCH_RATE:
            self._ready.append(self._current)
            self._leave()

    def yield_to_others(self) -> None:
        """Lets everything run that is ready, once."""
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

    def _require_current(self) -> Task:
        if self._current is None:
            raise Stuck("only a task of the world can wait")
        return self._current

    def _run_task(self, task: Task, function: Callable[[], object]) -> None:
        try:
            function()
        except greenlet.GreenletExit:
            raise
        except BaseException as error:  # noqa: BLE001 -- it goes on in `run`, whose caller sees it
            self._failure = self._failure or error
        finally:
            del self._tasks[task.ident]

    def _leave(self) -> None:
        shares = [context.leave() for context in self.contexts]
        self._hub.switch()
        for context, share in zip(self.contexts, shares, strict=True):
            context.enter(share)

    def _resume(self, task: Task) -> None:
        self.num_switches += 1
        self._current = task
        task.greenlet.switch()
        self._current = None

    def _next(self) -> Task:
        while not self._ready:
            if not self._timers:
                raise Stuck(f"no task can go on:\n{self.stacks()}")
            due_s, _, task, ticket = heapq.heappop(self._timers)
            if task.is_parked and task.ticket == ticket:
                self.now_s = max(self.now_s, due_s)
                task.is_parked = False
                self._ready.append(task)
        index = self._scheduling.randrange(len(self._ready)) if len(self._ready) > 1 else 0
        # The last one takes the place of the one that is drawn: the order is drawn anyway.
        self._ready[index], self._ready[-1] = self._ready[-1], self._ready[index]
        return self._ready.pop()
