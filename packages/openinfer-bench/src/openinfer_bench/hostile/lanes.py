"""`in_lanes`: work on several things at a time, each on processors of its own."""

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from multiprocessing.queues import Queue
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def in_lanes(work: Callable[[T], R], things: Sequence[T], *, processors: int) -> Iterator[tuple[T, Callable[[], R]]]:
    """Each thing with what returns the work's result or raises what it raised, as they end.

    Args:
        work: a function of a module; with `processors` it is called in processes of its own.
        things: to work on.
        processors: that a lane has, also for all processes that the work starts; 0 works on one thing after the other,
            on all processors, when it is asked for its result.
    """
    if not processors:
        yield from ((each, partial(work, each)) for each in things)
        return
    usable = sorted(os.sched_getaffinity(0))
    num_lanes = max(1, len(usable) // processors)
    context = multiprocessing.get_context("spawn")
    lanes: Queue[list[int]] = context.Queue()
    for index in range(num_lanes):
        lanes.put(usable[index * processors : (index + 1) * processors])
    with ProcessPoolExecutor(num_lanes, mp_context=context, initializer=_keep_to_one, initargs=(lanes,)) as pool:
        futures = {pool.submit(work, each): each for each in things}
        yield from ((futures[future], future.result) for future in as_completed(futures))


def _keep_to_one(lanes: "Queue[list[int]]") -> None:
    os.sched_setaffinity(0, lanes.get())
