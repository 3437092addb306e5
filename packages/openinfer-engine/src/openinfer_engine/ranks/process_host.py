"""`ProcessRankHost`: ranks as processes of the engine's machine, over two pipes each."""

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import IO

from openinfer_core import InvalidRequest
from openinfer_engine.ranks.contract import RankLink, RankSpec
from openinfer_engine.ranks.placement import Placement
from openinfer_engine.worker.messages import bodies, write_all

OPENINFER_CONTRACT = 1

CHILD_MODULE = "openinfer_engine.worker.process"
_LAST_WORDS_S = 3.0  # what a process that has closed its output may take to end


def open_processes(setting: str) -> "ProcessRankHost":
    """The host of `--rank-host process`."""
    if setting:
        raise InvalidRequest(f"--rank-host process takes no setting, and got {setting!r}", field="rank_host")
    return ProcessRankHost()


class ProcessRankHost:
    """Processes of this machine; rank N has GPU N."""

    def __init__(self) -> None:
        self._size = 1
        # Started by a thread that lives as long as they do: PR_SET_PDEATHSIG kills a child when that thread ends.
        self._starting = ThreadPoolExecutor(1, thread_name_prefix="openinfer-start-ranks")

    def start(self, rank: int, spec: RankSpec) -> RankLink:
        del rank
        self._size = spec.num_ranks
        return self._starting.submit(PipeLink).result()

    def placement(self) -> Placement:
        return Placement.on_one_node(self._size)

    def close(self) -> None:
        # After the links: the processes are killed when the thread that started them ends.
        self._starting.shutdown()


class PipeLink:
    """The process of one rank."""

    shares_environment = True

    def __init__(self) -> None:
        self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            [sys.executable, "-P", "-m", CHILD_MODULE], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("a process was started without pipes")
        self._hears: IO[bytes] = self._process.stdin
        self._says: IO[bytes] = self._process.stdout
        self._lock = threading.Lock()  # heartbeats come between the steps
        self._is_told_to_end = False
        self._is_read = False

    @property
    def name(self) -> str:
        return f"process {self._process.pid}"

    @property
    def process_id(self) -> int | None:
        return self._process.pid

    def send(self, frame: bytes) -> None:
        with self._lock:
            if self._is_told_to_end:
                raise BrokenPipeError("the process was told to end")
            write_all(self._hears.fileno(), frame)

    def frames(self) -> Iterator[bytes]:
        self._is_read = True
        try:
            yield from bodies(self._says.fileno())
        finally:
            self._says.close()

    def how_it_ended(self) -> str:
        """Its exit code or signal."""
        try:
            code = self._process.wait(_LAST_WORDS_S)
        except subprocess.TimeoutExpired:
            return "its process closed its output, though it still runs"
        return "its process ended with " + (f"exit code {code}" if code >= 0 else f"signal {-code}")

    def kill(self) -> None:
        self._process.kill()

    def end(self, *, deadline_s: float) -> None:
        # A thread that waits in `send` has the lock: the pipe of a process that hangs may be full.
        if self._lock.acquire(timeout=deadline_s):
            self._close_input()
            self._lock.release()
        try:
            self._process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with self._lock:
            self._close_input()
        if not self._is_read:
            self._says.close()

    def _close_input(self) -> None:
        self._is_told_to_end = True
        with contextlib.suppress(OSError):
            self._hears.close()
