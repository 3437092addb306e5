"""`Runner`: executes steps in order, asynchronously; `ThreadRunner` runs each rank in a thread of its own."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from openinfer_core import Refused
from openinfer_core.scheduling import StepPlan, StepResult
from openinfer_engine.errors import GroupBroken
from openinfer_engine.kv_tiers.pool import PoolMemory
from openinfer_engine.lifecycle.orders import ObeysOrders, WeightsOrder
from openinfer_engine.lora.rank_adapters import RankAdapters
from openinfer_engine.tracing.trace import NoTrace, Tracer


class Worker(Protocol):
    """One rank, which executes steps one after the other on one thread."""

    def launch(self, plan: StepPlan) -> "PendingStep":
        """Begins a step; may return before it is computed."""
        ...

    def pool_memory(self) -> PoolMemory:
        """Its blocks and slots, for KV tiers."""
        ...

    @property
    def adapters(self) -> RankAdapters | None:
        """Those that it holds; None where none are served."""
        ...

    def fence(self) -> Callable[[], None]:
        """What returns, on any thread, once the steps launched so far have run."""
        ...

    def close(self) -> None:
        """Frees what it holds, its end of the group last, when no step is running. Idempotent."""
        ...


class PendingStep(Protocol):
    """A step that was launched."""

    def result(self) -> StepResult:
        """Waits for the step and returns what it produced."""
        ...


class Runner(Protocol):
    """Executes steps one after the other; `launch` does not wait for them."""

    @property
    def failure(self) -> BaseException | None:
        """Why no step can be run any more, also if that came to light between two steps."""
        ...

    def launch(self, plan: StepPlan) -> PendingStep:
        """Queues a step after those launched before."""
        ...

    def close(self) -> None:
        """Waits for what was launched and frees everything. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class DoneStep:
    """A step that was computed when it was launched."""

    step_result: StepResult

    def result(self) -> StepResult:
        return self.step_result


class ThreadRunner:
    """One thread per rank; a step's result is rank 0's."""

    def __init__(self, ranks: Sequence[Worker], *, tracer: Tracer | None = None) -> None:
        self._ranks = list(ranks)
        self._tracer = tracer or NoTrace()
        self._threads = [
            ThreadPoolExecutor(1, thread_name_prefix=f"openinfer-rank-{rank}") for rank in range(len(self._ranks))
        ]

    @property
    def failure(self) -> BaseException | None:
        return None  # a thread cannot die between steps: what fails is a step, whose result raises

    @property
    def adapters(self) -> list[RankAdapters]:
        """Of each rank, first to last; none where none are served."""
        return [adapters for rank in self._ranks if (adapters := rank.adapters) is not None]

    def pool_memories(self) -> list[PoolMemory]:
        return [rank.pool_memory() for rank in self._ranks]

    def launch(self, plan: StepPlan) -> "_PendingStep":
        return _PendingStep([thread.submit(self._launch, index, plan) for index, thread in enumerate(self._threads)])

    def obey(self, order: WeightsOrder) -> None:
        """Has all ranks obey; raises what the first of them raised, the cause before what it broke."""
        ranks = [rank for rank in self._ranks if isinstance(rank, ObeysOrders)]
        if len(ranks) != len(self._ranks):
            raise Refused("this device cannot change its weights while it runs")
        futures = [thread.submit(rank.obey, order) for thread, rank in zip(self._threads, ranks, strict=True)]
        raise_first(futures)

    def _launch(self, index: int, plan: StepPlan) -> PendingStep:
        with self._tracer.span(f"rank {index}", "launch", step=plan.step):
            return self._ranks[index].launch(plan)

    def close(self) -> None:
        for thread in self._threads:
            thread.shutdown()
        for rank in self._ranks:
            rank.close()
        self._ranks.clear()


class _PendingStep:
    def __init__(self, futures: "list[Future[PendingStep]]") -> None:
        self._futures = futures

    def result(self) -> StepResult:
        raise_first(self._futures)
        return self._futures[0].result().result()


def raise_first(futures: "Sequence[Future[Any]]") -> None:
    """Waits for all, and raises an error of one, the cause before what it broke."""
    errors = [error for error in (future.exception() for future in futures) if error is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, GroupBroken)):
        raise error
