"""Whose fault it is that a guard process ended: a fault that passes is tried again and never held against a grammar."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from openinfer_core import GenerateRequest, InvalidRequest, RequestId, SamplingParams, Unavailable, find_plugin
from openinfer_core.grammars import Vocabulary
from openinfer_core.sampling import Grammar, GrammarKind
from openinfer_engine.grammars.compiler import LlguidanceCompiler
from openinfer_engine.grammars.guard import GrammarGuard, GrammarTooCostly, start_process
from openinfer_engine.grammars.guard_process import NICENESS
from openinfer_engine.grammars.kept import REFUSAL_KEPT_S
from openinfer_engine.vocabulary import read_num_token_ids

GOOD = Grammar(kind=GrammarKind.REGEX, text="[ab]{1,9}")
LARGE = Grammar(kind=GrammarKind.JSON_SCHEMA, text='{"enum": ["%s"]}' % ("x" * 500_000))  # more than a pipe holds
DEEP = Grammar(
    kind=GrammarKind.LARK,
    text="start: r0\n" + "\n".join(f'r{i}: "a" r{i + 1}' for i in range(20_000)) + '\nr20000: "x"',
)
READY = "import sys; sys.stdout.write('ready\\n'); sys.stdout.flush(); "
Start = Callable[[], subprocess.Popen[bytes]]
SPARE = 1  # a process that is started once a grammar was checked


def python(code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def dying(code: str) -> Start:
    """A process that says it is ready, and then does this."""
    return lambda: python(READY + code)


def ended_by(number: signal.Signals) -> Start:
    return dying(f"sys.stdin.readline(); import os; os.kill(os.getpid(), {int(number)})")


def failing(number: int) -> Start:
    """The system refuses another process."""

    def start() -> subprocess.Popen[bytes]:
        raise OSError(number, os.strerror(number))

    return start


no_room = failing(errno.EAGAIN)


FAULTS: dict[str, Start] = {
    "killed": ended_by(signal.SIGKILL),
    "told to end": ended_by(signal.SIGTERM),
    "ended by itself": dying("sys.stdin.readline()"),
    "stalled before it reads": dying("import time; time.sleep(600)"),
    "stalled": dying("sys.stdin.readline(); import time; time.sleep(600)"),
    "not started": lambda: python("pass"),
    "no room for a process": no_room,
    "no memory for a process": failing(errno.ENOMEM),
    "no descriptors for its pipes": failing(errno.EMFILE),
}


class Starts:
    """Starts what a list says, and then real processes."""

    def __init__(self, *first: Start) -> None:
        self._first = list(first)
        self.count = 0

    def __call__(self) -> subprocess.Popen[bytes]:
        self.count += 1
        return (self._first.pop(0) if self._first else start_process)()


def made(*first: Start) -> tuple[GrammarGuard, Starts]:
    """A guard that waits for a real process as long as it takes on any machine."""
    starts = Starts(*first)
    is_stalling = any(FAULTS[name] in first for name in FAULTS if name.startswith("stalled"))
    return GrammarGuard(start=starts, stall_s=0.2 if is_stalling else 60, deadline_s=60), starts


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_that_passes_is_tried_again_in_a_fresh_process(fault: str) -> None:
    guard, starts = made(FAULTS[fault])
    assert guard.check(LARGE if fault == "stalled before it reads" else GOOD, None)
    assert (starts.count - SPARE, guard.num_faults) == (2, 1)
    guard.close()


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if "stalled" not in fault])
def test_fault_that_stays_is_of_the_moment_and_the_next_grammar_is_checked(fault: str) -> None:
    guard, starts = made(FAULTS[fault], FAULTS[fault])
    with pytest.raises(Unavailable, match="was not there; try again"):
        guard.check(GOOD, None)
    assert guard.check(GOOD, None)
    assert (starts.count - SPARE, guard.num_faults) == (3, 2)
    guard.close()


@pytest.mark.parametrize("number", [signal.SIGPROF, signal.SIGSEGV, signal.SIGABRT])
def test_limit_counts_against_a_grammar_only_alone_in_a_fresh_process(number: signal.Signals) -> None:
    answers_once = 'sys.stdin.readline(); sys.stdout.write(\'{"grammar": "first"}\\n\'); sys.stdout.flush(); '
    guard, starts = made(dying(f"{answers_once}sys.stdin.readline(); import os; os.kill(os.getpid(), {int(number)})"))
    assert guard.check(GOOD, None) == "first"
    assert "first" not in guard.check(GOOD, None)
    assert (starts.count - SPARE, guard.num_faults) == (2, 0)
    guard.close()
    guard, starts = made(ended_by(number))
    with pytest.raises(GrammarTooCostly, match="too large, too deep or too slow"):
        guard.check(GOOD, None)
    assert (starts.count, guard.num_faults) == (1, 0)
    guard.close()


def test_grammar_that_ends_a_used_process_is_tried_alone() -> None:
    guard, starts = made()
    guard.check(GOOD, None)
    with pytest.raises(GrammarTooCostly):
        guard.check(DEEP, None)
    assert starts.count == 2
    assert guard.check(GOOD, None)
    guard.close()


def test_a_spare_process_is_there_before_it_is_needed_and_takes_the_place_of_one_that_died() -> None:
    guard, starts = made()
    assert (guard.pid, guard.spare_pid) == (None, None)
    guard.check(GOOD, None)
    spare = guard.spare_pid
    assert spare is not None
    os.kill(guard.pid or 0, signal.SIGKILL)
    guard.check(GOOD, None)
    assert guard.pid == spare
    assert guard.spare_pid not in (None, spare)
    assert starts.count == 3
    guard.close()
    assert (guard.pid, guard.spare_pid) == (None, None)
    with pytest.raises(ProcessLookupError):
        os.kill(spare, 0)


def test_a_spare_that_ended_unseen_costs_a_start_and_no_fault() -> None:
    guard, starts = made()
    guard.check(GOOD, None)
    for pid in (guard.spare_pid, guard.pid):
        os.kill(pid or 0, signal.SIGKILL)
        wait_until_ended(pid or 0)
    assert guard.check(GOOD, None)
    assert (starts.count, guard.num_faults) == (4, 0)
    guard.close()


def test_where_there_is_no_room_for_a_spare_grammars_are_checked_all_the_same() -> None:
    starts = Starts(start_process, no_room, no_room)
    guard = GrammarGuard(start=starts, stall_s=60, deadline_s=60)
    for _ in range(2):
        assert guard.check(GOOD, None)
        assert guard.spare_pid is None
    assert guard.check(GOOD, None)
    assert guard.spare_pid is not None
    assert (starts.count, guard.num_faults) == (4, 0)
    guard.close()


def test_checks_give_way_to_those_who_generate() -> None:
    guard, _ = made()
    guard.check(GOOD, None)
    assert os.getpriority(os.PRIO_PROCESS, guard.pid or 0) == min(19, os.nice(0) + NICENESS)
    guard.close()


def wait_until_ended(pid: int) -> None:
    """Until a child is dead; it is not reaped."""
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


MODEL_DIR: Path = find_plugin("openinfer.checkpoints", "tiny").load()()
VOCABULARY = Vocabulary(
    model_dir=MODEL_DIR, num_token_ids=read_num_token_ids(MODEL_DIR, vocab_size=2**20), eos_token_ids=(1,)
)


def asked(grammar: Grammar, tenant: str = "") -> GenerateRequest:
    sampling = SamplingParams(max_tokens=5, stop_token_ids=(1,), grammar=grammar)
    return GenerateRequest(request_id=RequestId(1), prompt_token_ids=(1,), sampling=sampling, tenant=tenant)


def test_only_refusals_are_remembered_and_those_for_cost_not_for_long() -> None:
    now_s = [0.0]
    guard, starts = made(no_room, no_room)
    compiler = LlguidanceCompiler(VOCABULARY, guard=guard, clock=lambda: now_s[0])
    with pytest.raises(Unavailable):
        compiler.compile(asked(GOOD)).result(60)
    compiler.compile(asked(GOOD)).result(60)
    for _ in range(3):
        with pytest.raises(InvalidRequest, match="too large"):
            compiler.compile(asked(DEEP)).result(60)
    tried = starts.count
    now_s[0] += REFUSAL_KEPT_S
    with pytest.raises(InvalidRequest, match="too large"):
        compiler.compile(asked(DEEP)).result(60)
    assert starts.count == tried + 1
    compiler.close()
