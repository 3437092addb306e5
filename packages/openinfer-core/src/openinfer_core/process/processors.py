"""Processors that this process may use, and which of its threads use them first."""

import contextlib
import os
import sys

_LOWEST = 19  # of Linux


def usable_processors() -> int:
    """How many processors this process may run on: `taskset` and cpusets of containers leave fewer than there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def lower_priority(levels: int) -> None:
    """Lets other threads use a processor before the calling one, which cannot be taken back.

    A level is a tenth of a processor's time from a thread that wants all of it next to one of the usual priority. Does
    nothing where a priority is a whole process' (all systems but Linux), or where a sandbox forbids it.

    Args:
        levels: of `nice`, from 1 to 19.
    """
    if levels > 0 and sys.platform == "linux":
        with contextlib.suppress(PermissionError):
            own = os.getpriority(os.PRIO_PROCESS, 0)
            os.setpriority(os.PRIO_PROCESS, 0, min(_LOWEST, own + levels))
