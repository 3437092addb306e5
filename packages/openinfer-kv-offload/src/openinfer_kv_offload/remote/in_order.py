"""`run_in_order`: several requests under way at once, whose ends are counted in the order of their beginning."""

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future


def run_in_order(
    executor: Executor, tasks: Iterable[Callable[[], None]], *, window: int, on_end: Callable[[], None]
) -> None:
    """Runs tasks in the threads of `executor`, at most `window` at a time, and calls `on_end` for each, in order.

    The first exception, of a task or of `on_end`, is raised here; what has not begun then never does, and what has
    begun may go on for a while.
    """
    pending: deque[Future[None]] = deque()
    try:
        for task in tasks:
            if len(pending) == window:
                pending.popleft().result()
                on_end()
            pending.append(executor.submit(task))
        while pending:
            pending.popleft().result()
            on_end()
    finally:
        for future in pending:
            future.cancel()
