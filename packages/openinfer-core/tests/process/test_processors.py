"""How many processors a process may use."""

import os

import pytest

from openinfer_core.process.processors import usable_processors


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system binds no process to processors")
def test_processors_that_a_process_is_kept_from_do_not_count():
    usable = os.sched_getaffinity(0)
    assert usable_processors() == len(usable)
    try:
        os.sched_setaffinity(0, {min(usable)})
        assert usable_processors() == 1
    finally:
        os.sched_setaffinity(0, usable)
