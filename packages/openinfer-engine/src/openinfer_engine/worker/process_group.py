"""`ProcessGroup`: the ranks of an engine after the first, each a process of its own with a device of its own.

    started ─► resolved ─► agreed on the smallest pool, joining ─► ready ─► steps … ─► left
       └──────────┴──────────────────┴───────────────────────────────┴──────┴──► failed: the engine ends

A thread per process reads what it says and notices its end. The first failure counts: it aborts rank 0's end of the
group, so that rank 0 waits for none, and the other processes are killed.
"""

import contextlib
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import IO

import msgspec

from openinfer_core import OpenInferError, Refused
from openinfer_core.scheduling import StepPlan
from openinfer_engine.distributed.communicator import Communicator
from openinfer_engine.engine_spec import EngineSpec
from openinfer_engine.errors import GroupBroken
from openinfer_engine.kv_tiers.remote_share import RemoteShare
from openinfer_engine.options import EngineOptions
from openinfer_engine.worker.messages import (
    Agree,
    Build,
    Fault,
    FaultKind,
    FromRank,
    Leave,
    Resolved,
    RunStep,
    ToRank,
    TransferEnded,
    bodies,
    from_rank_decoder,
    send,
)

logger = logging.getLogger("openinfer.engine")

CHILD_MODULE = "openinfer_engine.worker.process"
# what ranks may take to leave before they are killed: less than an engine's process may take to close
CLOSE_DEADLINE_S = 5.0
# how long a failure that another one has caused waits for that one, which is what a user should read
CAUSE_DEADLINE_S = 3.0


class ProcessGroup:
    """Starts the processes; `smallest_pool`, `agree` and `wait_ready` follow in this order, then `run` per step."""

    def __init__(self, spec: EngineSpec, count: int) -> None:
        self._changed = threading.Condition()
        self._pools: list[int] = []
        self._num_ready = 0
        self._failure: BaseException | None = None
        self._is_leaving = False
        self._communicator: Communicator | None = None
        self._workers: list[_WorkerProcess] = []
        self._watching: list[threading.Thread] = []
        self._starting = ThreadPoolExecutor(1, thread_name_prefix="openinfer-start-ranks")
        try:
            # Started by a thread that lives as long as they do: PR_SET_PDEATHSIG kills a child when that thread ends.
            for rank in range(1, count + 1):
                self._workers.append(self._starting.submit(_WorkerProcess, rank).result())
            for worker in self._workers:
                name = f"openinfer-watch-{worker.rank}"
                self._watching.append(threading.Thread(target=self._watch, args=(worker,), name=name, daemon=True))
                self._watching[-1].start()
                worker.tell(Build(msgspec.json.encode(spec), worker.rank))
        except BaseException:
            self.close(deadline_s=0)
            raise

    @property
    def failure(self) -> BaseException | None:
        return self._failure

    @property
    def process_ids(self) -> list[int]:
        return [worker.process_id for worker in self._workers]

    # --- start ------------------------------------------------------------------------------------------

    def smallest_pool(self, num_blocks: int) -> int:
        """Waits until all ranks have resolved; the blocks of the smallest pool, rank 0's with so many among them.

        Raises:
            Refused: a rank has no device, or what was asked does not fit into it.
            GroupBroken: a rank's process died.
        """
        self._wait_for(lambda: len(self._pools) == len(self._workers))
        return min(num_blocks, *self._pools)

    def agree(self, num_blocks: int, ticket: bytes, communicator: Communicator) -> None:
        with self._changed:
            self._communicator = communicator
        self._tell_all(Agree(num_blocks, ticket))

    def wait_ready(self) -> None:
        """Returns once all ranks are loaded and warm; raises as `smallest_pool`."""
        self._wait_for(lambda: self._num_ready == len(self._workers))

    @property
    def shares(self) -> list[RemoteShare]:
        return [worker.share for worker in self._workers]

    # --- steps and end ----------------------------------------------------------------------------------

    def run(self, plan: StepPlan) -> None:
        self._tell_all(RunStep.of(plan))

    def cause_of(self, error: BaseException) -> BaseException:
        """What to raise for an error of rank 0: what broke the group, if the error may be its effect."""
        is_own = isinstance(error, OpenInferError) and not isinstance(error, GroupBroken)
        if is_own or not isinstance(error, Exception):
            return error
        # A rank that dies takes memory with it that others read and write, so even a GPU's error may be its effect.
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None, CAUSE_DEADLINE_S)
        return self._failure or error

    def fail(self, error: BaseException) -> None:
        """Ends the group because of what happened to a rank, unless it has ended."""
        with self._changed:
            if self._is_leaving:
                return
        self.end_group(error)

    def end_group(self, error: BaseException) -> None:
        """Does what `fail` does, also while ranks leave."""
        with self._changed:
            if self._failure is not None:
                return
            # Set before the abort: rank 0, which that wakes, asks `cause_of` for it.
            self._failure = error
            communicator = self._communicator
            self._changed.notify_all()
        logger.error("%s; the group of ranks ends", error)
        if communicator is not None:
            communicator.abort(error)
        for worker in self._workers:
            worker.kill()

    def leave(self) -> None:
        """Asks all ranks to leave; their ends are no failures from here on."""
        with self._changed:
            self._is_leaving = True
        self._tell_all(Leave())

    def close(self, *, deadline_s: float = CLOSE_DEADLINE_S) -> None:
        """Ends the processes; those that take longer are killed. Idempotent."""
        with self._changed:
            self._is_leaving = True
        # After a failure the processes were killed already: there is nothing to wait for.
        end_s = time.monotonic() + (0 if self._failure is not None else deadline_s)
        for worker in self._workers:
            worker.end(deadline_s=max(0.0, end_s - time.monotonic()))
        for thread in self._watching:
            thread.join()
        # Last: the processes are killed when the thread that started them ends.
        self._starting.shutdown()

    # --- watching ---------------------------------------------------------------------------------------

    def _watch(self, worker: "_WorkerProcess") -> None:
        try:
            for body in bodies(worker.says.fileno()):
                self._hear(worker, from_rank_decoder.decode(body))
        except (OSError, ValueError, OpenInferError, msgspec.MsgspecError) as error:
            logger.error("rank %d: %s", worker.rank, error)
        worker.says.close()
        worker.share.end_all()
        self.fail(GroupBroken(f"rank {worker.rank} has died: its process ended with {worker.how_it_ended()}"))

    def _hear(self, worker: "_WorkerProcess", message: FromRank) -> None:
        if isinstance(message, Fault):
            self._fail_with(worker, message)
            return
        if isinstance(message, TransferEnded):
            worker.share.hear(message)
            return
        with self._changed:
            if isinstance(message, Resolved):
                self._pools.append(message.num_blocks)
            else:
                self._num_ready += 1
            self._changed.notify_all()

    def _fail_with(self, worker: "_WorkerProcess", fault: Fault) -> None:
        if fault.kind is FaultKind.REFUSED:
            self.fail(Refused(f"rank {worker.rank}: {fault.message}"))
            return
        if fault.kind is FaultKind.BROKEN:
            with self._changed:
                self._changed.wait_for(lambda: self._failure is not None, CAUSE_DEADLINE_S)
        self.fail(GroupBroken(f"rank {worker.rank} failed: {fault.message}"))

    def _wait_for(self, is_so: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: is_so() or self._failure is not None)
        if self._failure is not None:
            raise self._failure

    def _tell_all(self, message: ToRank) -> None:
        for worker in self._workers:
            worker.tell(message)


def start_workers(spec: EngineSpec, options: EngineOptions) -> ProcessGroup | None:
    return ProcessGroup(spec, options.num_rank_processes) if options.num_rank_processes else None


class _WorkerProcess:
    """The process of one worker."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.share = RemoteShare(self.tell)
        self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            [sys.executable, "-P", "-m", CHILD_MODULE], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("a process was started without pipes")
        self._hears: IO[bytes] = self._process.stdin
        self.says: IO[bytes] = self._process.stdout

    @property
    def process_id(self) -> int:
        return self._process.pid

    def tell(self, message: ToRank) -> None:
        """Sends a message; the watching thread finds out if the process is gone."""
        with contextlib.suppress(OSError, ValueError):
            send(self._hears.fileno(), message)

    def how_it_ended(self) -> str:
        """Its exit code or signal, for a process that has closed its output."""
        try:
            code = self._process.wait(CAUSE_DEADLINE_S)
        except subprocess.TimeoutExpired:
            return "its output closed, though it still runs"
        return f"exit code {code}" if code >= 0 else f"signal {-code}"

    def kill(self) -> None:
        self._process.kill()

    def end(self, *, deadline_s: float) -> None:
        with contextlib.suppress(OSError):
            self._hears.close()
        try:
            self._process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
