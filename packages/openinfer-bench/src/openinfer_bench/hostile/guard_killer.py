"""`GuardKiller`: ends the process that tries grammars, as the kernel does where memory is short."""

import os
import signal
from pathlib import Path

from openinfer_bench.hostile.background import BackgroundThread
from openinfer_bench.processes import descendants

_EVERY_S = 2.0  # an engine asks once more, in a fresh process, which is left time to answer
_LOOK_EVERY_S = 0.002
_PROGRAM = b"guard_process.py"
_RUNS = "R"


class GuardKiller(BackgroundThread):
    """Kills a server's guard process while it works on a grammar, every two seconds. A context manager.

    Attributes:
        num_killed: how often.
    """

    def __init__(self, pid: int) -> None:
        super().__init__("openinfer-guard-killer")
        self.num_killed = 0
        self._pid = pid

    def _run(self) -> None:
        pause_s = _LOOK_EVERY_S
        while not self._left.wait(pause_s):
            pause_s = _EVERY_S if self._kill_working() else _LOOK_EVERY_S

    def _kill_working(self) -> bool:
        try:
            guards = (pid for pid in descendants(self._pid) if is_guard(pid))
            guard = next((pid for pid in guards if works(pid)), None)  # an engine has a spare one, which waits
            if guard is None:
                return False
            os.kill(guard, signal.SIGKILL)
        except OSError:  # a process of the tree ended meanwhile
            return False
        self.num_killed += 1
        return True


def is_guard(pid: int) -> bool:
    """Whether a process tries grammars; raises `OSError` if it has ended."""
    arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return any(argument.endswith(_PROGRAM) for argument in arguments)


def works(pid: int) -> bool:
    """Whether a thread of a process has or wants a processor; raises `OSError` if it has ended."""
    threads = (path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat"))
    return any(text.rpartition(") ")[2].startswith(_RUNS) for text in threads)
