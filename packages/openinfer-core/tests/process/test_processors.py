"""How many processors a process may use, and which threads come last."""

import os
import sys
import threading

import pytest

from openinfer_core.fair_queue import FairQueue
from openinfer_core.process.processors import lower_priority, usable_processors


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system binds no process to processors")
def test_processors_that_a_process_is_kept_from_do_not_count():
    usable = os.sched_getaffinity(0)
    assert usable_processors() == len(usable)
    try:
        os.sched_setaffinity(0, {min(usable)})
        assert usable_processors() == 1
    finally:
        os.sched_setaffinity(0, usable)


def priority() -> int:
    return os.getpriority(os.PRIO_PROCESS, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a priority is a whole process'")
def test_threads_of_a_queue_come_after_others_and_no_other_thread_does():
    before = priority()
    queue = FairQueue("test", niceness=3)
    assert queue.submit("a", priority).result(60) == min(19, before + 3)
    queue.close()
    queue.join()
    usual = FairQueue("test")
    assert usual.submit("a", priority).result(60) == priority() == before
    usual.close()
    usual.join()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a priority is a whole process'")
def test_no_priority_is_lower_than_the_lowest():
    found: list[int] = []

    def lower() -> None:
        for _ in range(3):
            lower_priority(10)
            found.append(priority())

    thread = threading.Thread(target=lower)
    thread.start()
    thread.join()
    assert found[1:] == [19, 19]
