"""`StepRound`: one step of all data-parallel ranks, each with a plan of its own, or with none.

    loop 0 ─► PlanRunner 0.launch(plan) ─┐                                                      a thread per rank, or
    loop 1 ─► PlanRunner 1.launch(plan) ─┼─► StepRound.launch: how many tokens each rank has ─► a process per rank but
    loop 2: nothing to run ──────────────┘                                                      the first; 2 joins it

A rank's experts compute rows of all ranks, so each takes part in each step, and knows how many rows the others bring.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import NoReturn, Protocol, runtime_checkable

from openinfer_core.errors import ContractViolation
from openinfer_core.scheduling import StepPlan, StepResult
from openinfer_engine.data_parallel.step_sizes import is_decode
from openinfer_engine.distributed.expert_group import DataParallelCommunicator
from openinfer_engine.kv_tiers.pool import PoolMemory
from openinfer_engine.kv_tiers.share import TellingShare
from openinfer_engine.worker.runner import PendingStep, Worker, raise_first


@runtime_checkable
class JoinsSteps(Protocol):
    """A `Worker` that takes part in steps in which its own rank has no rows."""

    def join_step(self) -> None: ...


class SharedRank(Protocol):
    """A data-parallel rank, wherever it runs."""

    def begin(self, plan: StepPlan | None, counts: Sequence[int], *, is_decode: bool) -> "Future[PendingStep | None]":
        """Begins a step in which the ranks have `counts` tokens, and this one `plan`; its results are None without."""
        ...

    @property
    def share(self) -> TellingShare | None:
        """Its blocks and tiers, of a rank in another process; None of one that has them here."""
        ...

    def pool_memory(self) -> PoolMemory: ...

    def close(self) -> None: ...


class WatchesRanks(Protocol):
    """Knows of ranks' ends; `ProcessGroup`."""

    @property
    def failure(self) -> BaseException | None: ...

    def raise_cause(self, error: BaseException) -> NoReturn: ...


class StepRound:
    """The ranks of an engine and the step that is being put together. Not for several threads.

    Args:
        ranks: in order.
        watch: of those that are processes.
    """

    def __init__(self, ranks: Sequence[SharedRank], watch: WatchesRanks | None = None) -> None:
        self._ranks = list(ranks)
        self._watch = watch
        self._runners = [PlanRunner(rank, watch) for rank in self._ranks]

    @property
    def runners(self) -> "Sequence[PlanRunner]":
        """One for the step loop of each rank."""
        return self._runners

    def launch(self) -> bool:
        """Begins the step whose plans the runners were given; False if none was."""
        plans = [runner.take() for runner in self._runners]
        if not any(plans):
            return False
        counts = [0 if each is None else each.plan.num_tokens for each in plans]
        all_decode = all(each is None or is_decode(each.plan) for each in plans)
        # The first rank last: the others may be reached through pipes, which takes longer.
        futures = [
            rank.begin(None if each is None else each.plan, counts, is_decode=all_decode)
            for rank, each in reversed([*zip(self._ranks, plans, strict=True)])
        ][::-1]
        for rank, each in enumerate(plans):
            if each is not None:
                each.began(futures, rank, self._watch)
        return True


class PlanRunner:
    """Implements `Runner` for the step loop of one data-parallel rank."""

    def __init__(self, rank: SharedRank, watch: WatchesRanks | None) -> None:
        self._rank = rank
        self._watch = watch
        self._planned: _PlannedStep | None = None

    @property
    def failure(self) -> BaseException | None:
        # A thread cannot die between steps: what fails is a step, whose result raises.
        return None if self._watch is None else self._watch.failure

    @property
    def share(self) -> TellingShare | None:
        return self._rank.share

    def pool_memory(self) -> PoolMemory:
        return self._rank.pool_memory()

    def launch(self, plan: StepPlan) -> PendingStep:
        """Keeps the plan for the next step of all ranks."""
        if self._planned is not None:
            raise ContractViolation("a rank has one plan in a step")
        self._planned = _PlannedStep(plan)
        return self._planned

    def take(self) -> "_PlannedStep | None":
        planned, self._planned = self._planned, None
        return planned

    def close(self) -> None:
        self._rank.close()


class _PlannedStep:
    """A plan of one rank, and then what came of it."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self._futures: Sequence[Future[PendingStep | None]] = ()
        self._rank = 0
        self._watch: WatchesRanks | None = None

    def began(self, futures: "Sequence[Future[PendingStep | None]]", rank: int, watch: WatchesRanks | None) -> None:
        self._futures, self._rank, self._watch = futures, rank, watch

    def result(self) -> StepResult:
        """Raises what any rank raised, the cause before what it broke."""
        if self._watch is None:
            return self._result()
        try:
            result = self._result()
        except BaseException as error:  # noqa: BLE001 - its cause is raised
            self._watch.raise_cause(error)
        # A rank is gone: what this one has computed since may be wrong.
        if self._watch.failure is not None:
            raise self._watch.failure
        return result

    def _result(self) -> StepResult:
        # Threads all end, for one that fails breaks the others' exchanges: which was the cause is known when all have.
        # A rank in another process may wait on its GPU for one that has failed here, until the group is ended; there
        # the watch knows the cause.
        wait(self._futures, return_when=ALL_COMPLETED if self._watch is None else FIRST_EXCEPTION)
        raise_first([each for each in self._futures if each.done()])
        done = self._futures[self._rank].result()
        if done is None:
            raise ContractViolation("a rank with a plan has no step")
        return done.result()


class SharedSteps:
    """A rank's part of the steps of all ranks, wherever it runs.

    Args:
        worker: of the rank.
        communicator: the worker's.

    Raises:
        ContractViolation: the worker does not take part in others' steps.
    """

    def __init__(self, worker: Worker, communicator: DataParallelCommunicator) -> None:
        if not isinstance(worker, JoinsSteps):
            raise ContractViolation(f"{type(worker).__name__} has no join_step, and is no data-parallel rank")
        self._worker: Worker = worker
        self._joining: JoinsSteps = worker
        self._communicator = communicator

    def run(self, plan: StepPlan | None, counts: Sequence[int], *, is_decode: bool) -> PendingStep | None:
        """Launches the rank's plan, or has it join a step in which the ranks have `counts` tokens."""
        self._communicator.begin_step(counts, is_decode=is_decode)
        done = None if plan is None else self._worker.launch(plan)
        if (plan is None or not plan.num_tokens) and any(counts):
            self._joining.join_step()
        return done


class ThreadRank:
    """A data-parallel rank of this process and its thread.

    Args:
        index: of the rank.
        worker: closed with it.
        communicator: the worker's.
        enter_thread: what the thread calls first, which makes the rank's device its own.

    Raises:
        ContractViolation: the worker does not take part in others' steps.
    """

    share = None

    def __init__(
        self, index: int, worker: Worker, communicator: DataParallelCommunicator, enter_thread: Callable[[], None]
    ) -> None:
        self._steps = SharedSteps(worker, communicator)
        self._worker = worker
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"openinfer-rank-{index}", initializer=enter_thread)

    def begin(self, plan: StepPlan | None, counts: Sequence[int], *, is_decode: bool) -> "Future[PendingStep | None]":
        return self._thread.submit(self._steps.run, plan, counts, is_decode=is_decode)

    def pool_memory(self) -> PoolMemory:
        return self._worker.pool_memory()

    def begin_close(self) -> "Future[None]":
        """Closes the worker after all that was begun; no step follows."""
        # In the rank's own thread: its device is the current one there, and elsewhere the first rank's.
        closing = self._thread.submit(self._worker.close)
        self._thread.shutdown(wait=False)
        return closing

    def close(self) -> None:
        self.begin_close().result()
