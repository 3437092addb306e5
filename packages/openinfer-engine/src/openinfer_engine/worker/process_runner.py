"""`ProcessRunner`: rank 0 in a thread of the engine's process, the others in processes of their own."""

from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from openinfer_core import Refused
from openinfer_core.scheduling import StepPlan, StepResult
from openinfer_engine.distributed.communicator import Communicator
from openinfer_engine.engine_plan import EnginePlan
from openinfer_engine.kv_tiers.pool import PoolMemory
from openinfer_engine.lifecycle.orders import ObeysOrders, WeightsOrder
from openinfer_engine.lora.rank_adapters import RankAdapters
from openinfer_engine.tracing.trace import NoTrace, Tracer
from openinfer_engine.weights.loading import load_workers
from openinfer_engine.worker.process_group import CLOSE_DEADLINE_S, ProcessGroup
from openinfer_engine.worker.runner import PendingStep, Worker


def load_with_processes(engine_plan: EnginePlan, processes: ProcessGroup, tracer: Tracer) -> "ProcessRunner":
    """Loads rank 0 while the other ranks load, and returns the runner of all.

    Raises:
        Refused: a rank cannot be had.
        GroupBroken: the process of a rank died.
    """
    ticket, communicator = engine_plan.backend.open_group(engine_plan.options.tensor_parallel_size)
    return ProcessRunner(
        load_first_rank(engine_plan, processes, tracer, ticket, communicator), processes, tracer=tracer
    )


def agreed_plan(engine_plan: EnginePlan, processes: ProcessGroup) -> EnginePlan:
    """The plan of all ranks: with the smallest pool, where they are.

    Raises:
        Refused: a rank cannot be had, or computes with something else.
        GroupBroken: the process of a rank died.
    """
    smallest = processes.smallest_pool(engine_plan.num_blocks)
    processes.require_composition(partial(_composition_of, engine_plan))
    return engine_plan.with_num_blocks(smallest).placed(processes.placement)


def _composition_of(engine_plan: EnginePlan) -> dict[str, str]:
    from openinfer_engine.ranks.composition import composition_of  # needs what an engine on one machine does not

    return composition_of(engine_plan)


def load_first_rank(
    engine_plan: EnginePlan, processes: ProcessGroup, tracer: Tracer, ticket: bytes, communicator: Communicator
) -> Worker:
    """Loads rank 0, with its end of the group, while the other ranks load; raises as `load_with_processes`."""
    try:
        processes.agree(engine_plan.num_blocks, ticket, communicator)
        (worker,) = load_workers(engine_plan, [communicator], tracer)
        processes.wait_ready()
    except BaseException as error:
        communicator.abort(error)
        communicator.close()
        cause = processes.cause_of(error)
        if cause is error:
            raise
        raise cause from error
    return worker


class ProcessRunner:
    """Rank 0's worker and the processes of the others, which are closed with it; a step's result is rank 0's."""

    def __init__(
        self,
        worker: Worker,
        processes: ProcessGroup,
        *,
        tracer: Tracer | None = None,
        close_deadline_s: float = CLOSE_DEADLINE_S,
    ) -> None:
        self._worker: Worker | None = worker
        self._processes = processes
        self._tracer = tracer or NoTrace()
        self._close_deadline_s = close_deadline_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="openinfer-rank-0")

    @property
    def failure(self) -> BaseException | None:
        return self._processes.failure

    @property
    def process_ids(self) -> list[int]:
        return self._processes.process_ids

    @property
    def adapters(self) -> list[RankAdapters]:
        """Rank 0's alone, if adapters are served: the others are in their own processes."""
        adapters = None if self._worker is None else self._worker.adapters
        return [] if adapters is None else [adapters]

    def pool_memories(self) -> list[PoolMemory]:
        """Rank 0's alone: the others are in their own processes. Raises `RuntimeError` if the runner is closed."""
        if self._worker is None:
            raise RuntimeError("the runner is closed")
        return [self._worker.pool_memory()]

    def launch(self, plan: StepPlan) -> "_PendingStep":
        self._processes.run(plan)  # before rank 0 launches, since the others are reached through pipes and take longer
        return _PendingStep(self._thread.submit(self._launch, plan), self._processes)

    def obey(self, order: WeightsOrder) -> None:
        """Has all ranks obey, rank 0 among them; raises `Refused` or `GroupBroken` once all have answered."""
        worker = self._worker
        if not isinstance(worker, ObeysOrders):
            raise Refused("this device cannot change its weights while it runs")
        self._processes.begin_order(order)
        error = self._thread.submit(worker.obey, order).exception()
        self._processes.wait_obeyed()
        if error is not None:
            raise error

    def _launch(self, plan: StepPlan) -> PendingStep:
        if self._worker is None:
            raise RuntimeError("the runner is closed")
        with self._tracer.span("rank 0", "launch", step=plan.step):
            return self._worker.launch(plan)

    def close(self) -> None:
        """Waits for what was launched, if all ranks live, and lets them leave; `GroupBroken` if rank 0 hangs."""
        worker, self._worker = self._worker, None
        if worker is None:
            return
        self._processes.leave()
        # On the thread that launches, so that it comes after every step that was launched.
        closing = self._thread.submit(worker.close)
        try:
            self._processes.close_after(closing, deadline_s=self._close_deadline_s)
        finally:
            self._thread.shutdown(wait=closing.done(), cancel_futures=True)


class _PendingStep:
    def __init__(self, future: "Future[PendingStep]", processes: ProcessGroup) -> None:
        self._future = future
        self._processes = processes

    def result(self) -> StepResult:
        try:
            result = self._future.result().result()
        except BaseException as error:  # noqa: BLE001 - its cause is raised
            self._processes.raise_cause(error)
        # A rank is gone: what rank 0 has computed since may be wrong.
        if self._processes.failure is not None:
            raise self._processes.failure
        return result
