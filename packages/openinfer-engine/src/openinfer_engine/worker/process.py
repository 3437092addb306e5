"""The process of one rank other than the first: what a `RankHost` starts and `ProcessGroup` tells what to run.

    python -m openinfer_engine.worker.process                         orders from standard input, answers on its output
    python -m openinfer_engine.worker.process --link FD [--model DIR] both through a socket that it inherits

Whatever it prints goes to standard error, and at SIGUSR1 where each of its threads is. When its orders end without a
`Leave`, or nothing comes for too long, the engine is gone, and so is the process, whatever it was waiting for; on Linux
also if it cannot notice, because it is stopped and what started it has ended. As the engine process does, it ignores
SIGINT and SIGTERM.
"""

import argparse
import contextlib
import ctypes
import faulthandler
import functools
import io
import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from openinfer_core import OpenInferError, Refused
from openinfer_core.errors import ContractViolation
from openinfer_core.process.logs import label_logs, set_up_logs
from openinfer_core.process.resident import return_freed_memory, settle_memory
from openinfer_engine.child import SWITCH_INTERVAL_S
from openinfer_engine.data_parallel.remote_rank import DataParallelWorker
from openinfer_engine.distributed.expert_group import DataParallelCommunicator
from openinfer_engine.engine_plan import resolve
from openinfer_engine.engine_spec import EngineSpec
from openinfer_engine.errors import GroupBroken
from openinfer_engine.kv_tiers import MemoryPrefault, begin_prefault, open_port
from openinfer_engine.kv_tiers.share_service import ShareOrder, ShareService
from openinfer_engine.lifecycle.orders import ObeysOrders
from openinfer_engine.lora.remote_rank import AdapterOrder, AdapterService
from openinfer_engine.options import DeviceKind
from openinfer_engine.ranks.composition import composition_of
from openinfer_engine.ranks.silence import STARTING_LIMIT_S, Silence, Ticker
from openinfer_engine.tracing.trace import NoTrace
from openinfer_engine.weights.loading import load_workers
from openinfer_engine.worker.messages import (
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
    RunShared,
    RunStep,
    ToRank,
    WorkerReady,
    bodies,
    send,
    to_rank_decoder,
)
from openinfer_engine.worker.runner import Worker
from openinfer_kv_cache import TellingTier

logger = logging.getLogger("openinfer.engine")

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
Message = TypeVar("Message", bound=ToRank)


def main(argv: Sequence[str] = ()) -> int:
    """Serves one engine; returns the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--link", type=int)
    parser.add_argument("--model", type=Path)
    arguments = parser.parse_args(argv)
    faulthandler.enable()
    if sys.platform != "win32":
        faulthandler.register(signal.SIGUSR1)  # of a rank that waits for another one there is nothing else to see
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    _end_with_parent()
    # Standard output is the pipe to the engine: what a library prints must not get into it.
    said = os.dup(1)
    os.dup2(2, 1)
    heard, said = (0, said) if arguments.link is None else (arguments.link, arguments.link)
    return serve_engine(heard, said, functools.partial(_load, model_dir=arguments.model))


def serve_engine(heard: int, said: int, load: "Callable[[Orders, Answers], tuple[Worker, ShareService | None]]") -> int:
    """Loads a rank and serves its engine; returns the exit code.

    Args:
        heard: the descriptor that orders come from.
        said: the descriptor that answers go to.
        load: takes the orders up to `Agree`, and gives the answers up to `WorkerReady`.
    """
    answers = Answers(said)
    orders = Orders(heard, answers)
    try:
        set_up_logs(os.environ)
        return_freed_memory()
        worker, share = load(orders, answers)
        orders.expect_heartbeats()
        settle_memory()
        _serve(worker, share, orders, answers)
        if share is not None:
            share.close()
        worker.close()
    except BaseException as error:
        if not isinstance(error, OpenInferError):
            logger.exception("this rank failed")
        with contextlib.suppress(OSError):  # the engine may be gone too
            answers.send(Fault(_kind_of(error), _said(error)))
        return 1
    return 0


def _end_with_parent() -> None:
    """Linux kills this process when the thread that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _load(orders: "Orders", answers: "Answers", *, model_dir: Path | None) -> "tuple[Worker, ShareService | None]":
    build = orders.take(Build)
    label_logs(f"rank {build.rank}")
    spec = msgspec.json.decode(build.spec, type=EngineSpec)
    definition, options = spec.read()
    engine_plan = resolve(
        definition, model_dir or Path(spec.model_dir), options, rank=build.rank, placement=build.placement
    )
    answers.send(Resolved(engine_plan.num_blocks, composition_of(engine_plan) if build.wants_composition else {}))
    agreed = orders.take(Agree)
    engine_plan = engine_plan.with_num_blocks(agreed.num_blocks)
    size, is_data_parallel = engine_plan.options.num_ranks, engine_plan.options.data_parallel_size > 1
    tiers = engine_plan.open_tiers(rank=build.rank)
    is_on_device = engine_plan.options.device is DeviceKind.CUDA
    # While the weights load: taking gigabytes of pages takes seconds.
    pages = begin_prefault(tiers, num_ranks=size) if tiers is not None and is_on_device else MemoryPrefault([])
    communicator = engine_plan.backend.join_group(agreed.ticket, rank=build.rank, size=size)
    shared = DataParallelCommunicator(communicator) if is_data_parallel else None
    try:
        (worker,) = load_workers(engine_plan, [shared or communicator], NoTrace(), stream=io.StringIO())
    except BaseException as error:
        communicator.abort(error)
        raise
    share = None
    if tiers is not None:
        pages.finish()
        load_timeout_s = engine_plan.options.kv_load_timeout_ms / 1000
        share = ShareService(
            open_port(tiers, pool=worker.pool_memory(), load_timeout_s=load_timeout_s),
            answer=answers.send,
            fail=orders.fail,
            enter_thread=engine_plan.backend.enter_thread,
            # Its scheduler is the engine's; without one of its own it holds what rank 0 holds.
            telling=tiers.tier if is_data_parallel and isinstance(tiers.tier, TellingTier) else None,
        )
    if shared is not None:
        enter_thread = engine_plan.backend.enter_thread
        worker = DataParallelWorker(worker, shared, answer=answers.send, fail=orders.fail, enter_thread=enter_thread)
    answers.send(WorkerReady())
    return worker, share


def _serve(worker: Worker, share: ShareService | None, orders: "Orders", answers: "Answers") -> None:
    adapters = None if worker.adapters is None else AdapterService(worker.adapters, answer=answers.send)
    while not isinstance(order := orders.next(), Leave):
        if isinstance(order, RunStep):
            worker.launch(order.plan())
        elif isinstance(order, RunShared) and isinstance(worker, DataParallelWorker):
            worker.run(order)
        elif adapters is not None and isinstance(order, AdapterOrder):
            adapters.take(order)
        elif isinstance(order, Obey):
            answers.send(Obeyed(order.number, _obey(worker, order)))
        elif share is not None and isinstance(order, ShareOrder):
            share.take(order, worker.fence())
        else:
            raise ContractViolation(f"{type(order).__name__} came where a step was due")


def _obey(worker: Worker, order: Obey) -> str | None:
    """Why the rank could not: it lives on, without weights maybe."""
    if not isinstance(worker, ObeysOrders):
        return "this device cannot change its weights while it runs"
    try:
        worker.obey(order.order)
    except GroupBroken:
        raise
    except Exception as error:
        if not isinstance(error, OpenInferError):
            logger.exception("the order %s failed", type(order.order).__name__)
        return _said(error)
    return None


def _kind_of(error: BaseException) -> FaultKind:
    if isinstance(error, GroupBroken):
        return FaultKind.BROKEN
    return FaultKind.REFUSED if isinstance(error, Refused) else FaultKind.FAILED


def _said(error: BaseException) -> str:
    return str(error) if isinstance(error, OpenInferError) else f"{type(error).__name__}: {error}"


class Answers:
    """What goes to the engine, from any thread."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()

    def send_heartbeats(self, *, interval_s: float) -> None:
        """Says that this rank lives, so often, until the process ends."""
        Ticker(self._beat, interval_s=interval_s, clock=time.monotonic, name="openinfer-beat")

    def _beat(self, elapsed_s: float) -> None:
        del elapsed_s
        with contextlib.suppress(OSError):  # the orders end, too
            self.send(Heartbeat())

    def send(self, message: FromRank) -> None:
        with self._lock:
            send(self._descriptor, message)


class Orders:
    """What the engine says, read by a thread of its own, so that the engine's end is noticed at any time."""

    def __init__(self, descriptor: int, answers: Answers) -> None:
        self._answers = answers
        self._silence = Silence(limit_s=STARTING_LIMIT_S)
        self._timeout_s = STARTING_LIMIT_S
        self._received: queue.SimpleQueue[ToRank | BaseException] = queue.SimpleQueue()
        threading.Thread(target=self._read, args=(descriptor,), name="openinfer-orders", daemon=True).start()

    def expect_heartbeats(self) -> None:
        """From here on the engine that is silent for as long as `Build` says counts as gone."""
        self._silence.set_limit(self._timeout_s)

    def next(self) -> ToRank:
        """Raises what another thread of the rank has failed with."""
        order = self._received.get()
        if isinstance(order, BaseException):
            raise order
        return order

    def fail(self, error: BaseException) -> None:
        self._received.put(error)

    def take(self, kind: type[Message]) -> Message:
        order = self.next()
        if not isinstance(order, kind):
            raise ContractViolation(f"{type(order).__name__} came where {kind.__name__} was due")
        return order

    def _read(self, descriptor: int) -> None:
        has_left = False
        try:
            for body in bodies(descriptor):
                self._silence.heard()
                order = to_rank_decoder.decode(body)
                if isinstance(order, Build):
                    self._begin(order)
                if not isinstance(order, Heartbeat):
                    self._received.put(order)
                has_left = has_left or isinstance(order, Leave)
        finally:
            if not has_left:
                logging.shutdown()
                os._exit(1)

    def _begin(self, build: Build) -> None:
        self._timeout_s = build.timeout_s
        interval_s = Silence(limit_s=build.timeout_s).interval_s
        self._answers.send_heartbeats(interval_s=interval_s)
        Ticker(self._look, interval_s=interval_s, clock=time.monotonic, name="openinfer-silence")

    def _look(self, elapsed_s: float) -> None:
        if self._silence.look(elapsed_s):
            logger.error("the engine has said nothing for %g s: this rank ends", self._silence.limit_s)
            logging.shutdown()
            os._exit(1)


if __name__ == "__main__":
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    exit_code = main(sys.argv[1:])
    logging.shutdown()
    os._exit(exit_code)  # a rank that failed may hold threads that wait for ranks that are gone
