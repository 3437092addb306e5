"""`install`: the modules of the standard library that product code takes time, threads and entropy from, of a world.

`threading.Condition`, `Event`, `Semaphore` and `Barrier`, the queues and `concurrent.futures` are Python's own: they
are written in Python and build on `threading.Lock`, which is the world's. What is written in C and waits by itself is
replaced (`Lock`, `RLock`, `Thread`, `local`, `SimpleQueue`), and what differs between versions of Python in the locks
or the turns of a loop that it takes (`executor.py`, `asyncio_waits.py`).
"""

import asyncio  # before `threading.local` is replaced: its running loop is handed over by `LoopContext` instead
import importlib
import os
import queue
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, cast

from openinfer_core.testing.simulation.asyncio_waits import install_waits
from openinfer_core.testing.simulation.executor import NUM_PROCESSORS, install_executor
from openinfer_core.testing.simulation.world import Task, World


def install(world: World) -> None:
    """Replaces, for good, what names of the standard library stand for. Before any module of openinfer is imported."""
    _install_time(world)
    _install_entropy(world)
    os.cpu_count = lambda: NUM_PROCESSORS
    if hasattr(os, "sched_getaffinity"):
        setattr(os, "sched_getaffinity", _all_processors)  # noqa: B010 - of some systems
    _install_threads(world)
    _install_order_of_tasks()
    install_waits()
    world.contexts.append(LoopContext())


def _all_processors(pid: int, /) -> set[int]:
    del pid
    return set(range(NUM_PROCESSORS))


# --- clocks -------------------------------------------------------------------------------------------------


def _install_time(world: World) -> None:
    def monotonic(clock: int = 0, /) -> float:  # `clock_gettime` names a clock; all of them are this one
        del clock
        return world.now_s

    def monotonic_ns(clock: int = 0, /) -> int:
        del clock
        return round(world.now_s * 1e9)

    def wall() -> float:
        return world.now_s + world.wall_offset_s

    def wall_ns() -> int:
        return round(wall() * 1e9)

    def sleep(duration_s: float, /) -> None:
        world.sleep(duration_s)

    for name in ("monotonic", "perf_counter", "thread_time", "process_time"):
        setattr(time, name, monotonic)
        setattr(time, f"{name}_ns", monotonic_ns)
    time.time, time.time_ns, time.sleep = wall, wall_ns, sleep
    time.clock_gettime, time.clock_gettime_ns = monotonic, monotonic_ns
    # These have bound the names of `time` when they were imported.
    for module in (queue, threading):
        for name in ("time", "_time"):
            if hasattr(module, name):
                setattr(module, name, monotonic)


# --- entropy ------------------------------------------------------------------------------------------------


def _install_entropy(world: World) -> None:
    source = random.Random(world.seed ^ 0x9E3779B97F4A7C15)  # noqa: S311 - a simulation's secrets are none

    def urandom(size: int, /) -> bytes:
        return source.randbytes(size)

    os.urandom = urandom
    random._urandom = urandom  # type: ignore[attr-defined] # noqa: SLF001 - what `secrets` draws from
    random.seed(world.seed)


# --- threads ------------------------------------------------------------------------------------------------


def _install_threads(world: World) -> None:
    class WorldLock(_Lock):
        _world = world

    class WorldRLock(_RLock):
        _world = world

    class WorldThread(_Thread):
        _world = world

    class WorldLocal(_Local):
        _world = world

    main = WorldThread(name="MainThread")

    def get_ident() -> int:
        return 0 if world.current is None else world.current.ident

    def main_thread() -> _Thread:
        return world.process.main_thread or main

    def current_thread() -> _Thread:
        return main_thread() if world.current is None else WorldThread.of_task.get(world.current.ident, main_thread())

    names: Mapping[str, Any] = {
        "Lock": WorldLock,
        "_allocate_lock": WorldLock,
        "RLock": WorldRLock,
        "_RLock": WorldRLock,
        "_CRLock": WorldRLock,
        "Thread": WorldThread,
        "local": WorldLocal,
        "get_ident": get_ident,
        "get_native_id": get_ident,
        "current_thread": current_thread,
        "main_thread": main_thread,
        "enumerate": lambda: [main_thread(), *WorldThread.of_task.values()],
        "active_count": lambda: 1 + len(WorldThread.of_task),
    }
    for name, stand_in in names.items():
        setattr(threading, name, stand_in)
    queue.SimpleQueue = queue._PySimpleQueue  # type: ignore[attr-defined, misc] # noqa: SLF001 - the one in C waits by itself
    install_executor()


def _install_order_of_tasks() -> None:
    """What a loop cancels when it ends, in the order in which it began; a set has that of addresses in memory."""
    tasks: Any = importlib.import_module("asyncio.tasks")
    of_loop: Callable[[Any], set[Any]] = tasks.all_tasks

    def in_order(loop: Any = None) -> Any:
        # The names that asyncio gives are numbers after one word.
        return dict.fromkeys(sorted(of_loop(loop), key=lambda task: (len(task.get_name()), task.get_name()))).keys()

    asyncio.all_tasks = tasks.all_tasks = in_order


class _Lock:
    _world: World

    def __init__(self) -> None:
        self._is_locked = False
        self._waiting: deque[Task] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:  # noqa: FBT001, FBT002 - as `threading` has it
        world = self._world
        world.maybe_switch()
        if not self._is_locked:
            self._is_locked = True
            return True
        if not blocking:
            return False
        due_s = None if timeout < 0 else world.now_s + timeout
        while self._is_locked:
            task = world.current
            if task is None:
                raise RuntimeError("a lock is waited for outside of all tasks")
            self._waiting.append(task)
            if not world.park(None if due_s is None else due_s - world.now_s) and task in self._waiting:
                self._waiting.remove(task)
                if self._is_locked:
                    return False
        self._is_locked = True
        return True

    def release(self) -> None:
        if not self._is_locked:
            raise RuntimeError("release unlocked lock")
        self._is_locked = False
        if self._waiting:
            self._world.wake(self._waiting.popleft())

    def locked(self) -> bool:
        return self._is_locked

    def _at_fork_reinit(self) -> None:
        self._is_locked = False
        self._waiting.clear()

    __enter__ = acquire

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_locked = False
        if self._waiting:
            self._world.wake(self._waiting.popleft())


class _RLock:
    _world: World

    def __init__(self) -> None:
        self._lock = cast("Any", threading.Lock)()
        self._owner: int | None = None
        self._count = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:  # noqa: FBT001, FBT002 - as `threading` has it
        if self._owner == threading.get_ident():
            self._count += 1
            return True
        if not self._lock.acquire(blocking, timeout):
            return False
        self._owner, self._count = threading.get_ident(), 1
        return True

    def release(self) -> None:
        if self._owner != threading.get_ident():
            raise RuntimeError("cannot release un-acquired lock")
        self._count -= 1
        if not self._count:
            self._owner = None
            self._lock.release()

    __enter__ = acquire

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    # What `threading.Condition` asks of it.

    def _release_save(self) -> tuple[int, int | None]:
        saved = self._count, self._owner
        self._count, self._owner = 0, None
        self._lock.release()
        return saved

    def _acquire_restore(self, saved: tuple[int, int | None]) -> None:
        self._lock.acquire()
        self._count, self._owner = saved

    def _is_owned(self) -> bool:
        return self._owner == threading.get_ident()

    def _at_fork_reinit(self) -> None:
        self.__init__()


class _Thread:
    _world: World
    of_task: dict[int, "_Thread"] = {}  # noqa: RUF012 - one process has one world

    def __init__(
        self,
        group: None = None,
        target: Callable[..., object] | None = None,
        name: str | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        del group
        self.name = name or "thread"
        self.daemon = bool(daemon)
        self._target = target
        self._args = args
        self._named: Mapping[str, Any] = kwargs or {}
        self._task: Task | None = None
        self._is_over = False
        self._waiting: list[Task] = []

    @property
    def ident(self) -> int | None:
        return None if self._task is None else self._task.ident

    native_id = ident

    def start(self) -> None:
        if self._task is not None:
            raise RuntimeError("threads can only be started once")
        self._task = self._world.spawn(self._begin, name=self.name, daemon=self.daemon)
        self.of_task[self._task.ident] = self

    def run(self) -> None:
        if self._target is not None:
            self._target(*self._args, **self._named)

    def join(self, timeout: float | None = None) -> None:
        due_s = None if timeout is None else self._world.now_s + timeout
        while self.is_alive():
            if self._world.current is None:
                raise RuntimeError("a thread is joined outside of all tasks")
            self._waiting.append(self._world.current)
            self._world.park(None if due_s is None else due_s - self._world.now_s)
            if due_s is not None and self._world.now_s >= due_s:
                return

    def is_alive(self) -> bool:
        return self._task is not None and not self._is_over

    def _begin(self) -> None:
        try:
            self.run()
        except Exception as error:  # noqa: BLE001 - a thread's exception ends the thread, as in a real process
            self._world.note("thread", self.name, "ended by", repr(error))
            threading.excepthook(cast("Any", threading.ExceptHookArgs([type(error), error, error.__traceback__, None])))
        finally:
            self._is_over = True
            if self._task is not None:
                self.of_task.pop(self._task.ident, None)
            for task in self._waiting:
                self._world.wake(task)


class _Local:
    _world: World

    def __init__(self) -> None:
        object.__setattr__(self, "_of_tasks", {})

    def _own(self) -> dict[str, Any]:
        task = self._world.current
        return object.__getattribute__(self, "_of_tasks").setdefault(0 if task is None else task.ident, {})

    def __getattr__(self, name: str) -> Any:
        try:
            return self._own()[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self._own()[name] = value

    def __delattr__(self, name: str) -> None:
        try:
            del self._own()[name]
        except KeyError:
            raise AttributeError(name) from None


class LoopContext:
    """What asyncio keeps for a real thread changes hands with tasks of the world: loop, task, hooks of generators."""

    def __init__(self) -> None:
        tasks: Any = importlib.import_module("asyncio.tasks")
        self._leave_task: Callable[[Any, Any], None] = tasks._leave_task  # noqa: SLF001 - asyncio's hooks for other loops
        self._enter_task: Callable[[Any, Any], None] = tasks._enter_task  # noqa: SLF001

    def leave(self) -> Any:
        loop = asyncio._get_running_loop()  # noqa: SLF001
        if loop is None:
            return None
        task = asyncio.current_task(loop)
        if task is not None:
            self._leave_task(loop, task)
        asyncio._set_running_loop(None)  # noqa: SLF001
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(None, None)
        return loop, task, hooks

    def enter(self, share: Any) -> None:
        loop, task, hooks = share
        asyncio._set_running_loop(loop)  # noqa: SLF001
        sys.set_asyncgen_hooks(*hooks)
        if task is not None:
            self._enter_task(loop, task)
