"""`check_a_killed_rank`: what an engine says when the process of one of its ranks is killed between two steps."""

import os
import signal
from collections.abc import Iterable

import pytest

from openinfer_core import GenerateRequest
from openinfer_core.process.host import EngineLoop
from openinfer_engine import GroupBroken
from openinfer_engine.worker.process_group import ProcessGroup


def check_a_killed_rank(loop: EngineLoop, processes: ProcessGroup, requests: Iterable[GenerateRequest]) -> None:
    """Kills rank 1 after five steps; `requests` take more."""
    for each in requests:
        loop.submit(each)
    for _ in range(5):
        loop.step()
    os.kill(processes.process_ids[0], signal.SIGKILL)
    with pytest.raises(GroupBroken, match="rank 1 has died: its process ended with signal 9"):
        _run_to_the_end(loop)


def _run_to_the_end(loop: EngineLoop) -> None:
    while loop.busy:
        loop.step()
