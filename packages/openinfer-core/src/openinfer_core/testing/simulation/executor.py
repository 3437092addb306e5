"""`ThreadPoolExecutor` of a world: as Python 3.11 has it, whose threads take locks in another order than later ones'.

Each lock is a place where threads change, so that one seed would be another run in each.
"""

import concurrent.futures
import importlib
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

NUM_PROCESSORS = 16  # of every machine, or how many threads there are would be this machine's


def install_executor() -> None:
    """Replaces the standard library's, for good; after its locks."""
    VirtualThreadPoolExecutor.all_lock = threading.Lock()
    for name in ("concurrent.futures", "concurrent.futures.thread"):
        module: Any = importlib.import_module(name)
        module.ThreadPoolExecutor = VirtualThreadPoolExecutor


class VirtualThreadPoolExecutor(concurrent.futures.Executor):
    """`ThreadPoolExecutor`, whose threads end when it is shut down, and not when it is freed."""

    all_lock: Any  # of all executors: Python's own holds one when it ends

    def __init__(
        self,
        max_workers: int | None = None,
        thread_name_prefix: str = "",
        initializer: Callable[..., object] | None = None,
        initargs: Sequence[Any] = (),
    ) -> None:
        self._most_threads = max_workers or NUM_PROCESSORS + 4
        self._prefix = thread_name_prefix or "executor"
        self._initialize = lambda: initializer and initializer(*initargs)
        self._lock = threading.Lock()
        self._waiting: Any = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._threads: list[threading.Thread] = []
        self._is_shut = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "concurrent.futures.Future[Any]":
        with self._lock, self.all_lock:
            if self._is_shut:
                raise RuntimeError("cannot schedule new futures after shutdown")
            future: concurrent.futures.Future[Any] = concurrent.futures.Future()
            self._waiting.put((future, fn, args, kwargs))
            if not self._idle.acquire(timeout=0) and len(self._threads) < self._most_threads:
                thread = threading.Thread(target=self._work, name=f"{self._prefix}_{len(self._threads)}")
                thread.start()
                self._threads.append(thread)
            return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: FBT001, FBT002 - as Python has it
        with self._lock:
            self._is_shut = True
            while cancel_futures and not self._waiting.empty():
                item = self._waiting.get_nowait()
                if item is not None:
                    item[0].cancel()
            self._waiting.put(None)
        for thread in self._threads if wait else ():
            thread.join()

    def _work(self) -> None:
        self._initialize()
        while (item := self._waiting.get()) is not None:
            future, function, arguments, named = item
            if future.set_running_or_notify_cancel():
                try:
                    result = function(*arguments, **named)
                except BaseException as error:  # noqa: BLE001 - raised where it is waited for
                    future.set_exception(error)
                else:
                    future.set_result(result)
            del item, future, function, arguments, named
            self._idle.release()
        self._waiting.put(None)  # for the next of them
