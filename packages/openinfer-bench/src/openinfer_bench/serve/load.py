"""Sending a phase's requests from several processes, so that the client is not what is measured."""

import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from openinfer_bench.serve.messages import Assignment, Job, Outcome, Target
from openinfer_bench.serve.workloads import Phase
from openinfer_core import EngineClosed

_START_S = 1.0
_START_PER_JOB_S = 0.002
"""What client processes get to read their assignment before the first request."""


def send_load(target: Target, phase: Phase, *, processes: int) -> list[Outcome]:
    """The outcomes of a phase's jobs, in the order of the jobs.

    Args:
        target: the server.
        phase: what is sent.
        processes: to send from, at most; no more than there are places.
    """
    begin_at_s = time.time() + _START_S + _START_PER_JOB_S * len(phase.jobs)
    assignments = shares_of(target, phase, processes=processes, begin_at_s=begin_at_s)
    with ThreadPoolExecutor(len(assignments)) as threads:
        found = list(threads.map(_work, assignments))
    return interleaved(found, phase.jobs)


def shares_of(target: Target, phase: Phase, *, processes: int, begin_at_s: float) -> list[Assignment]:
    """What each client process does of a phase."""
    count = max(1, min(processes, len(phase.jobs), phase.places))
    shares = [phase.jobs[index::count] for index in range(count)]
    places = [phase.places // count + (index < phase.places % count) for index in range(count)]
    return [
        Assignment(target=target, jobs=list(jobs), places=number, begin_at_s=begin_at_s)
        for jobs, number in zip(shares, places, strict=True)
    ]


def interleaved(found: Sequence[list[Outcome]], jobs: Sequence[Job]) -> list[Outcome]:
    """What client processes found, in the order of the phase's jobs."""
    return [found[index % len(found)][index // len(found)] for index in range(len(jobs))]


def _work(assignment: Assignment) -> list[Outcome]:
    command = [sys.executable, "-P", "-m", "openinfer_bench.serve.worker"]
    done = subprocess.run(command, input=msgspec.msgpack.encode(assignment), stdout=subprocess.PIPE, check=False)  # noqa: S603
    if done.returncode:
        raise EngineClosed(f"a client process ended with code {done.returncode}; its last words are above")
    return msgspec.msgpack.decode(done.stdout, type=list[Outcome])
