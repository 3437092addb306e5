"""Instructions that a process executes, where `perf` can count them; other load on the machine does not change them."""

import contextlib
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Generator
from dataclasses import dataclass

_EVENTS = "instructions:u,instructions:k"
_COUNT = re.compile(r"^\s*(\d+)\s+instructions:[uk]", re.MULTILINE)
_ATTACH_S = 0.2
"""What perf gets to attach itself."""


@dataclass(slots=True)
class Count:
    """Instructions of one stretch of time.

    Attributes:
        value: user's and kernel's together; None if they could not be counted.
    """

    value: int | None = None


@contextlib.contextmanager
def counting(pid: int) -> Generator[Count]:
    """Counts the instructions of a process and its threads until the context is left."""
    count, perf = Count(), shutil.which("perf")
    if perf is None:
        yield count
        return
    command = [perf, "stat", "--event", _EVENTS, "--pid", str(pid)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:  # noqa: S603
        time.sleep(_ATTACH_S)
        try:
            yield count
        finally:
            process.send_signal(signal.SIGINT)
            _, said = process.communicate()
    found = _COUNT.findall(said)
    count.value = sum(map(int, found)) if len(found) == 2 else None
