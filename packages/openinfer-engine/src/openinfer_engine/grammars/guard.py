"""`GrammarGuard`: the engine's side of the guard process."""

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

from openinfer_core import Grammar, InvalidRequest

CPU_S = 1.0  # processor time that one grammar may take; common ones take 1 to 40 ms
DEADLINE_S = 20.0  # of the clock, for a machine so busy that processor time hardly passes
MAX_MESSAGE = 300  # characters of llguidance's message that a client is shown
# llguidance's own, below its defaults: a mask of a hostile grammar takes tens of milliseconds, not seconds
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 20_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 200_000,
}
_PROCESS = Path(__file__).with_name("guard_process.py")
_TOO_MUCH = "it is too large, too deep or too slow to check"


class GrammarGuard:
    """Starts its process when it is first asked, and again when a grammar has ended it.

    One thread asks; any may close.
    """

    def __init__(self, *, cpu_s: float = CPU_S, deadline_s: float = DEADLINE_S) -> None:
        self._cpu_s = cpu_s
        self._deadline_s = deadline_s
        self._is_closed = False
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        process = self._process
        return None if process is None else process.pid

    def check(self, grammar: Grammar, head: str | None) -> str:
        """A grammar in llguidance's notation, which compiles within the bounds.

        Args:
            grammar: as it was sent.
            head: Lark that is put before it and refers to it as `@body`.

        Raises:
            InvalidRequest: it is malformed, not supported or too expensive.
            RuntimeError: the process cannot be started, or this is closed.
        """
        asked = {
            "kind": str(grammar.kind),
            "text": grammar.text,
            "head": head,
            "limits": LIMITS,
            "cpu_s": self._cpu_s,
        }
        reply = self._ask(json.dumps(asked).encode() + b"\n")
        if reply is None:
            self._end()
            raise refused(grammar, _TOO_MUCH)
        answered: dict[str, str] = json.loads(reply)
        if "error" in answered:
            raise refused(grammar, answered["error"])
        return answered["grammar"]

    def close(self) -> None:
        """Ends the process for good: a request that waits for it is refused. Idempotent."""
        with self._lock:
            self._is_closed = True
        self._end()

    def _end(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def _ask(self, line: bytes) -> bytes | None:
        """The answer to a request; None if the process died of it or exceeded the deadline."""
        stdin, stdout = self._pipes()
        try:
            stdin.write(line)
            stdin.flush()
            return _read_line(stdout.fileno(), time.monotonic() + self._deadline_s)
        except (BrokenPipeError, ValueError):  # it died of the request, or was closed meanwhile
            return None

    def _pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        if self._process is not None and self._process.poll() is not None:
            self._end()
        started = self._process is None
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the grammar guard is closed")
            process = self._process = self._process or _start()
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("the guard process has no pipes")
        if started and _read_line(process.stdout.fileno(), time.monotonic() + self._deadline_s) is None:
            self._end()
            raise RuntimeError(f"the guard process did not start; python -P {_PROCESS} shows why")
        return process.stdin, process.stdout


def _start() -> subprocess.Popen[bytes]:
    # by its path: only llguidance is loaded; -P: its folder is not on the import path
    return subprocess.Popen(  # noqa: S603 - our own interpreter and file
        [sys.executable, "-P", str(_PROCESS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # Rust's last words about a stack that overflowed
    )


def refused(grammar: Grammar, why: str) -> InvalidRequest:
    reason = " ".join(why.split())
    shown = reason if len(reason) <= MAX_MESSAGE else reason[:MAX_MESSAGE] + "..."
    return InvalidRequest(f"the grammar ({grammar.kind}) cannot be used: {shown}", field="grammar")


def _read_line(source: int, deadline_s: float) -> bytes | None:
    parts: list[bytes] = []
    while not parts or not parts[-1].endswith(b"\n"):
        left_s = deadline_s - time.monotonic()
        readable: tuple[Any, ...] = select.select([source], [], [], max(0.0, left_s))
        data = os.read(source, 2**16) if readable[0] else b""
        if not data:
            return None
        parts.append(data)
    return b"".join(parts)
