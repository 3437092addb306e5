"""Data-parallel ranks that are processes, of this machine or another one: both ends of their steps.

    engine   `RemoteSteps.begin` ─► RunShared: tokens of each rank, this rank's plan or none
    rank     `DataParallelWorker.run` ─► launches its plan or joins the step ─► StepDone, if it had a plan
    engine   `RemoteSteps.hear` ─► the step's result

Schedulers are the engine's; a rank has a pool, its weights, and what it samples.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from openinfer_core.errors import ContractViolation
from openinfer_core.scheduling import StepPlan
from openinfer_engine.data_parallel.runner import SharedSteps
from openinfer_engine.distributed.expert_group import DataParallelCommunicator
from openinfer_engine.kv_tiers.pool import PoolMemory
from openinfer_engine.lora.rank_adapters import RankAdapters
from openinfer_engine.worker.messages import FromRank, RunShared, StepDone, ToRank
from openinfer_engine.worker.runner import DoneStep, PendingStep, Worker


class RemoteSteps:
    """The engine's end of the steps of one rank; what comes is heard in another thread than what is begun."""

    def __init__(self, tell: Callable[[ToRank], None]) -> None:
        self._tell = tell
        self._lock = threading.Lock()
        self._waiting: deque[tuple[int, Future[PendingStep | None]]] = deque()
        self._ended: BaseException | None = None

    def begin(self, plan: StepPlan | None, counts: Sequence[int], *, is_decode: bool) -> "Future[PendingStep | None]":
        """Tells the rank of a step; done when its result is there, or at once where the rank has no plan."""
        future: Future[PendingStep | None] = Future()
        with self._lock:
            if self._ended is not None:
                future.set_exception(self._ended)
                return future
            if plan is not None:
                self._waiting.append((plan.step, future))
        if plan is None:
            future.set_result(None)
        self._tell(RunShared.of(plan, counts, is_decode=is_decode))
        return future

    def hear(self, done: StepDone) -> None:
        """Raises `ContractViolation` for what is not the result of the step that is due."""
        with self._lock:
            step, future = self._waiting.popleft() if self._waiting else (-1, None)
        if future is None or step != done.step:
            raise ContractViolation(f"a rank has ended step {done.step}, and {step} was due")
        future.set_result(DoneStep(done.result()))

    def end_all(self, error: BaseException) -> None:
        """The rank is gone: no result comes, of later steps either."""
        with self._lock:
            self._ended = error
            waiting, self._waiting = self._waiting, deque()
        for _, future in waiting:
            future.set_exception(error)


class DataParallelWorker:
    """The worker of a rank's process, which runs steps of all ranks.

    Args:
        worker: the rank's own, closed with it.
        communicator: that worker's.
        answer: takes what goes to the engine, in the thread that waits for results.
        fail: takes what a step has raised when its result was due.
        enter_thread: what that thread calls first, which makes the rank's device its own.
    """

    def __init__(
        self,
        worker: Worker,
        communicator: DataParallelCommunicator,
        *,
        answer: Callable[[FromRank], None],
        fail: Callable[[BaseException], None],
        enter_thread: Callable[[], None],
    ) -> None:
        self._steps = SharedSteps(worker, communicator)
        self._worker = worker
        self._answer, self._fail, self._enter_thread = answer, fail, enter_thread
        self._launched: queue.SimpleQueue[tuple[int, PendingStep] | None] = queue.SimpleQueue()
        self._answering = threading.Thread(target=self._answer_all, name="openinfer-results", daemon=True)
        self._answering.start()

    def run(self, order: RunShared) -> None:
        plan = order.step_plan()
        launched = self._steps.run(plan, order.counts, is_decode=order.is_decode)
        if plan is not None and launched is not None:
            self._launched.put((plan.step, launched))

    def launch(self, plan: StepPlan) -> PendingStep:
        raise ContractViolation("a data-parallel rank runs no step of its own")

    def pool_memory(self) -> PoolMemory:
        return self._worker.pool_memory()

    @property
    def adapters(self) -> RankAdapters | None:
        return self._worker.adapters

    def fence(self) -> Callable[[], None]:
        return self._worker.fence()

    def close(self) -> None:
        self._launched.put(None)
        self._answering.join()
        self._worker.close()

    def _answer_all(self) -> None:
        try:
            self._enter_thread()
            while (launched := self._launched.get()) is not None:
                step, pending = launched
                self._answer(StepDone.of(step, pending.result()))
        except BaseException as error:  # noqa: BLE001 - the thread that takes orders raises it
            self._fail(error)
