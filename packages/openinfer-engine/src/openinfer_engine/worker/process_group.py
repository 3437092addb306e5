"""`ProcessGroup`: the ranks of an engine after the first, each a process with a device of its own, on any machine.

    started ─► resolved ─► agreed on the smallest pool, joining ─► ready ─► steps … ─► left
       └──────────┴──────────────────┴───────────────────────────────┴──────┴──► failed: the engine ends

A thread per rank reads what it says and notices its end. A rank that says nothing for too long counts as one that has
died (`ranks.silence`). The first failure counts: it aborts rank 0's end of the group, so that rank 0 waits for none,
and the other ranks are killed.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import NoReturn

import msgspec

from openinfer_core import OpenInferError, Refused
from openinfer_core.process.wire import encode_frame
from openinfer_core.scheduling import StepPlan
from openinfer_engine.data_parallel.remote_rank import RemoteSteps
from openinfer_engine.distributed.communicator import Communicator
from openinfer_engine.engine_spec import EngineSpec
from openinfer_engine.errors import GroupBroken
from openinfer_engine.kv_tiers.remote_share import RemoteShare
from openinfer_engine.lifecycle.orders import WeightsOrder
from openinfer_engine.lora.remote_rank import RemoteRank
from openinfer_engine.options import DeviceKind, EngineOptions
from openinfer_engine.ranks.contract import RankHost, RankLink, RankSpec
from openinfer_engine.ranks.placement import Placement
from openinfer_engine.ranks.process_host import CHILD_MODULE, ProcessRankHost
from openinfer_engine.ranks.silence import STARTING_LIMIT_S, Silence, Ticker
from openinfer_engine.worker.messages import (
    AdapterHeld,
    Agree,
    Build,
    Fault,
    FaultKind,
    FromRank,
    Heartbeat,
    Leave,
    Obey,
    Obeyed,
    Resolved,
    RunStep,
    StepDone,
    TiersChanged,
    ToRank,
    TransferEnded,
    from_rank_decoder,
)

__all__ = ["CHILD_MODULE", "CLOSE_DEADLINE_S", "DEFAULT_TIMEOUT_S", "ProcessGroup", "start_workers"]

logger = logging.getLogger("openinfer.engine")

# what ranks may take to leave before they are killed: less than an engine's process may take to close
CLOSE_DEADLINE_S = 5.0
# how long a failure that another one has caused waits for that one, which is what a user should read
CAUSE_DEADLINE_S = 3.0
DEFAULT_TIMEOUT_S = 8.0
_BEAT = bytes(encode_frame(Heartbeat()))


class ProcessGroup:
    """Starts the ranks; `smallest_pool`, `agree` and `wait_ready` follow in this order, then `run` per step.

    Args:
        spec: what each rank is told to build.
        count: of ranks after the first.
        host: where they run, closed with the group; by default processes of this machine.
        timeout_s: the silence of a rank that ends the group, once all are ready.
        on_gpu: whether each rank needs a GPU.
        clock: seconds, for the silence of ranks.
    """

    def __init__(
        self,
        spec: EngineSpec,
        count: int,
        *,
        host: RankHost | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        on_gpu: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._changed = threading.Condition()
        self._num_ready = 0
        self._num_orders = 0
        self._obeyed: list[tuple[int, Obeyed]] = []  # answers to the last order, with the rank that gave them
        self._failure: BaseException | None = None
        self._is_leaving = False
        self._communicator: Communicator | None = None
        self._host = host or ProcessRankHost()
        self._timeout_s = timeout_s
        self._workers: list[_Worker] = []
        self._watching: list[threading.Thread] = []
        self._tickers: list[Ticker] = []
        try:
            rank_spec = RankSpec(num_ranks=count + 1, on_gpu=on_gpu)
            for rank in range(1, count + 1):
                self._workers.append(_Worker(rank, self._host.start(rank, rank_spec)))
            self._placement = self._host.placement() if count else Placement.on_one_node(1)
            for worker in self._workers:
                name = f"openinfer-watch-{worker.rank}"
                self._watching.append(threading.Thread(target=self._watch, args=(worker,), name=name, daemon=True))
                self._watching[-1].start()
                worker.tell(
                    Build(
                        spec=msgspec.json.encode(spec),
                        rank=worker.rank,
                        placement=self._placement,
                        timeout_s=timeout_s,
                        wants_composition=not worker.link.shares_environment,
                    )
                )
            if self._workers:
                # Two threads: the one that says so may wait for the pipe of a rank that hangs.
                self._tickers.append(self._ticker(self._beat, clock, name="openinfer-beat"))
                self._tickers.append(self._ticker(self._look, clock, name="openinfer-silence"))
        except BaseException:
            self.close(deadline_s=0)
            raise

    @property
    def placement(self) -> Placement:
        """Where all ranks are."""
        return self._placement

    @property
    def failure(self) -> BaseException | None:
        return self._failure

    @property
    def process_ids(self) -> list[int]:
        """Those of this machine."""
        return [worker.link.process_id for worker in self._workers if worker.link.process_id is not None]

    # --- start ------------------------------------------------------------------------------------------

    def smallest_pool(self, num_blocks: int) -> int:
        """Waits until all ranks have resolved; the blocks of the smallest pool, rank 0's with so many among them.

        Raises:
            Refused: a rank has no device, or what was asked does not fit into it.
            GroupBroken: a rank's process died.
        """
        self._wait_for(lambda: all(worker.resolved is not None for worker in self._workers))
        return min(num_blocks, *(worker.resolved.num_blocks for worker in self._workers if worker.resolved is not None))

    def require_composition(self, composition: Callable[[], Mapping[str, str]]) -> None:
        """Compares what rank 0 computes with, if ranks may have something else; after `smallest_pool`.

        Raises:
            Refused: a rank does; the message names what.
        """
        from openinfer_engine.ranks.composition import require_same  # needs the whole plan

        others = [worker for worker in self._workers if not worker.link.shares_environment]
        if not others:
            return
        here = composition()
        for worker in others:
            if worker.resolved is not None:
                require_same(here, worker.resolved.composition, rank=worker.rank, place=worker.link.name)

    def agree(self, num_blocks: int, ticket: bytes, communicator: Communicator) -> None:
        with self._changed:
            self._communicator = communicator
        self._tell_all(Agree(num_blocks, ticket))

    def wait_ready(self) -> None:
        """Returns once all ranks are loaded and warm; raises as `smallest_pool`."""
        self._wait_for(lambda: self._num_ready == len(self._workers))
        for worker in self._workers:
            worker.silence.set_limit(self._timeout_s)

    @property
    def shares(self) -> list[RemoteShare]:
        return [worker.share for worker in self._workers]

    @property
    def adapters(self) -> list[RemoteRank]:
        return [worker.adapters for worker in self._workers]

    @property
    def steps(self) -> list[RemoteSteps]:
        """Of data-parallel ranks."""
        return [worker.steps for worker in self._workers]

    # --- steps and end ----------------------------------------------------------------------------------

    def run(self, plan: StepPlan) -> None:
        self._tell_all(RunStep.of(plan))

    def begin_order(self, order: WeightsOrder) -> None:
        """Tells all ranks what to do between two steps; `wait_obeyed` follows."""
        with self._changed:
            self._num_orders += 1
            self._obeyed.clear()
        self._tell_all(Obey(self._num_orders, order))

    def wait_obeyed(self) -> None:
        """Returns once all ranks have done it.

        Raises:
            Refused: one could not; the message says which and why.
            GroupBroken: a rank's process died.
        """
        self._wait_for(lambda: len(self._obeyed) == len(self._workers))
        for rank, answer in sorted(self._obeyed, key=lambda each: each[0]):
            if answer.failure is not None:
                raise Refused(f"rank {rank}: {answer.failure}")

    def cause_of(self, error: BaseException) -> BaseException:
        """What to raise for an error of rank 0: what broke the group, if the error may be its effect."""
        is_own = isinstance(error, OpenInferError) and not isinstance(error, GroupBroken)
        if is_own or not isinstance(error, Exception):
            return error
        # A rank that dies takes memory with it that others read and write, so even a GPU's error may be its effect.
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None, CAUSE_DEADLINE_S)
        return self._failure or error

    def raise_cause(self, error: BaseException) -> NoReturn:
        """Raises `cause_of` an error of rank 0's step; the group ends with one that is its own."""
        cause = self.cause_of(error)
        if cause is error:
            self.fail(error)
            raise error
        raise cause from error

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
            worker.link.kill()

    def leave(self) -> None:
        """Asks all ranks to leave; their ends are no failures from here on."""
        with self._changed:
            self._is_leaving = True
        self._tell_all(Leave())

    def close_after(self, closing: "Future[None]", *, deadline_s: float = CLOSE_DEADLINE_S) -> None:
        """Ends the processes, which were asked to leave, when rank 0 has closed; `GroupBroken` if that hangs."""
        end_s = time.monotonic() + deadline_s
        try:
            closing.result(deadline_s)
        except TimeoutError as late:
            error = GroupBroken(f"rank 0 has not left within {deadline_s:g} s: it, or who it waits for, hangs")
            self.end_group(error)  # aborts the communicator, which is what rank 0 may be waiting in
            raise error from late
        finally:
            self.close(deadline_s=max(0.0, end_s - time.monotonic()))

    def close(self, *, deadline_s: float = CLOSE_DEADLINE_S) -> None:
        """Ends the processes; those that take longer are killed. Idempotent."""
        with self._changed:
            self._is_leaving = True
        # After a failure the processes were killed already: there is nothing to wait for.
        end_s = time.monotonic() + (0 if self._failure is not None else deadline_s)
        for ticker in self._tickers:
            ticker.end()
        for worker in self._workers:
            worker.link.end(deadline_s=max(0.0, end_s - time.monotonic()))
        for thread in self._watching:
            thread.join()
        for ticker in self._tickers:
            ticker.join()
        self._host.close()

    # --- watching ---------------------------------------------------------------------------------------

    def _watch(self, worker: "_Worker") -> None:
        try:
            for body in worker.link.frames():
                worker.silence.heard()
                self._hear(worker, from_rank_decoder.decode(body))
        except (OSError, ValueError, OpenInferError, msgspec.MsgspecError) as error:
            logger.error("rank %d: %s", worker.rank, error)
        worker.share.end_all()
        worker.adapters.end_all()
        error = GroupBroken(f"rank {worker.rank} has died: {worker.link.how_it_ended()}")
        self.fail(error)
        worker.steps.end_all(self._failure or error)

    def _ticker(self, call: Callable[[float], None], clock: Callable[[], float], *, name: str) -> Ticker:
        return Ticker(call, interval_s=Silence(limit_s=self._timeout_s).interval_s, clock=clock, name=name)

    def _beat(self, elapsed_s: float) -> None:
        del elapsed_s
        for worker in self._workers:
            worker.send(_BEAT)

    def _look(self, elapsed_s: float) -> None:
        for worker in self._workers:
            if worker.silence.look(elapsed_s):
                self.fail(
                    GroupBroken(
                        f"rank {worker.rank} ({worker.link.name}) has said nothing for {worker.silence.limit_s:g} s: "
                        "its process hangs, or the network drops what it says"
                    )
                )

    def _hear(self, worker: "_Worker", message: FromRank) -> None:
        if isinstance(message, Fault):
            self._fail_with(worker, message)
            return
        if isinstance(message, TransferEnded):
            worker.share.hear(message)
            return
        if isinstance(message, TiersChanged):
            worker.share.hear_of_tiers(message)
            return
        if isinstance(message, AdapterHeld):
            worker.adapters.hear(message)
            return
        if isinstance(message, StepDone):
            worker.steps.hear(message)
            return
        if isinstance(message, Heartbeat):
            return
        with self._changed:
            if isinstance(message, Resolved):
                worker.resolved = message
            elif isinstance(message, Obeyed):
                if message.number == self._num_orders:
                    self._obeyed.append((worker.rank, message))
            else:
                self._num_ready += 1
            self._changed.notify_all()

    def _fail_with(self, worker: "_Worker", fault: Fault) -> None:
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
        frame = bytes(encode_frame(message))
        for worker in self._workers:
            worker.send(frame)


def start_workers(spec: EngineSpec, options: EngineOptions) -> ProcessGroup | None:
    """The ranks that are processes, at the host that the options name; None if there are none.

    Raises:
        InvalidRequest, Refused, PluginError: as `open_rank_host` and `RankHost.start`; where there are none, too, if no
            package offers the host.
    """
    from openinfer_engine.ranks.choice import check_rank_host, open_rank_host

    if not options.num_rank_processes:
        check_rank_host(options)
        return None
    return ProcessGroup(
        spec,
        options.num_rank_processes,
        host=open_rank_host(options),
        timeout_s=options.rank_timeout_s,
        on_gpu=options.device is DeviceKind.CUDA,
    )


class _Worker:
    """A rank, as the group knows it."""

    def __init__(self, rank: int, link: RankLink) -> None:
        self.rank = rank
        self.link = link
        self.share = RemoteShare(self.tell)
        self.adapters = RemoteRank(self.tell)
        self.steps = RemoteSteps(self.tell)
        self.silence = Silence(limit_s=STARTING_LIMIT_S)
        self.resolved: Resolved | None = None

    def tell(self, message: ToRank) -> None:
        self.send(bytes(encode_frame(message)))

    def send(self, frame: bytes) -> None:
        """Sends a frame; the watching thread finds out if the rank is gone."""
        with contextlib.suppress(OSError):
            self.link.send(frame)
