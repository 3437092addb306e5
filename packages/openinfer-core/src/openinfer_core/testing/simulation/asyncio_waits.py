"""`asyncio.wait_for` and `asyncio.gather`, the same in every Python: each turn of a loop that they take is charged."""

import asyncio
import importlib
from collections.abc import Awaitable, Sequence
from typing import Any


def install_waits() -> None:
    """Replaces asyncio's own, for good."""
    tasks: Any = importlib.import_module("asyncio.tasks")
    for stand_in in (wait_for, gather):
        for module in (asyncio, tasks):
            setattr(module, stand_in.__name__, stand_in)


async def wait_for(fut: Awaitable[Any], timeout: float | None) -> Any:  # noqa: ASYNC109 - as asyncio has it
    """As Python 3.11 has it, with a task; later ones take fewer turns."""
    if timeout is None:
        return await fut
    task = asyncio.ensure_future(fut)
    try:
        if timeout > 0:
            await asyncio.wait([task], timeout=timeout)
    finally:
        is_over = task.done()
        if not is_over:
            task.cancel()
            await asyncio.wait([task])
    if not is_over and task.cancelled():
        raise TimeoutError
    return task.result()


def gather(*awaitables: Awaitable[Any], return_exceptions: bool = False) -> "asyncio.Future[list[Any]]":
    """As Python 3.12 has it: done at once where all are; earlier ones take a turn, which hides loops without any."""
    futures = [asyncio.ensure_future(each) for each in awaitables]
    if not futures:
        outer = asyncio.get_running_loop().create_future()
        outer.set_result([])
        return outer
    outer = _Gathering(futures)
    left = len(futures)

    def end(future: "asyncio.Future[Any]") -> None:
        nonlocal left
        left -= 1
        error = asyncio.CancelledError() if future.cancelled() else future.exception()
        if outer.done():
            return
        if error is not None and not return_exceptions:
            outer.set_exception(error)
        elif not left and outer.was_cancelled:
            outer.set_exception(asyncio.CancelledError())
        elif not left:
            outer.set_result([_outcome(each) for each in futures])

    over = [future for future in futures if future.done()]
    for future in futures:
        if not future.done():
            future.add_done_callback(end)
    for future in over:
        end(future)
    return outer


class _Gathering(asyncio.Future[list[Any]]):
    def __init__(self, futures: "Sequence[asyncio.Future[Any]]") -> None:
        super().__init__(loop=futures[0].get_loop())
        self._futures = futures
        self.was_cancelled = False

    def cancel(self, msg: Any = None) -> bool:
        """What is gathered is cancelled, and it ends with the last of it."""
        if self.done():
            return False
        cancelled = [future.cancel(msg) for future in self._futures]
        self.was_cancelled |= any(cancelled)
        return any(cancelled)


def _outcome(future: "asyncio.Future[Any]") -> Any:
    return asyncio.CancelledError() if future.cancelled() else future.exception() or future.result()
