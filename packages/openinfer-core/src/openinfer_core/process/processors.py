"""Processors that this process may use."""

import os


def usable_processors() -> int:
    """How many processors this process may run on: `taskset` and cpusets of containers leave fewer than there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
