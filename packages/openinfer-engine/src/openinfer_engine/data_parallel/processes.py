"""Data-parallel ranks of which all but the first are processes: loading them, and their end."""

import time
from collections.abc import Sequence

from openinfer_core.errors import ContractViolation
from openinfer_engine.data_parallel.remote_rank import RemoteSteps
from openinfer_engine.data_parallel.runner import SharedRank, ThreadRank
from openinfer_engine.distributed.expert_group import DataParallelCommunicator
from openinfer_engine.engine_plan import EnginePlan
from openinfer_engine.errors import GroupBroken
from openinfer_engine.kv_tiers.pool import PoolMemory
from openinfer_engine.ranks.composition import composition_of
from openinfer_engine.tracing.trace import Tracer
from openinfer_engine.weights.loading import load_workers
from openinfer_engine.worker.process_group import CLOSE_DEADLINE_S, ProcessGroup


def agreed_plan(engine_plan: EnginePlan, processes: ProcessGroup) -> EnginePlan:
    """That of all ranks: with the smallest pool, where they are; raises as `ProcessGroup.smallest_pool`."""
    smallest = processes.smallest_pool(engine_plan.num_blocks)
    processes.require_composition(lambda: composition_of(engine_plan))
    return engine_plan.with_num_blocks(smallest).placed(processes.placement)


def load_ranks(engine_plan: EnginePlan, processes: ProcessGroup, tracer: Tracer) -> Sequence[SharedRank]:
    """Loads rank 0 while the other ranks load; closing it closes them all.

    Raises:
        Refused: a rank cannot be had.
        GroupBroken: the process of a rank died.
    """
    size = engine_plan.options.data_parallel_size
    ticket, others = engine_plan.backend.open_group(size)
    communicator = DataParallelCommunicator(others)
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
    first = ThreadRank(0, worker, communicator, engine_plan.backend.enter_thread)
    return [FirstRank(first, processes), *(RemoteRank(steps) for steps in processes.steps)]


class FirstRank:
    """The rank of the engine's process, and the end of all."""

    def __init__(self, rank: ThreadRank, processes: ProcessGroup) -> None:
        self.begin = rank.begin
        self.pool_memory = rank.pool_memory
        self._rank = rank
        self._processes = processes

    def close(self) -> None:
        """Lets the other ranks leave; `GroupBroken` if this one hangs."""
        self._processes.leave()
        closing, end_s = self._rank.begin_close(), time.monotonic() + CLOSE_DEADLINE_S
        try:
            closing.result(CLOSE_DEADLINE_S)
        except TimeoutError as late:
            error = GroupBroken(f"rank 0 has not left within {CLOSE_DEADLINE_S:g} s: it, or who it waits for, hangs")
            self._processes.end_group(error)  # aborts the communicator, which is what rank 0 may be waiting in
            raise error from late
        finally:
            self._processes.close(deadline_s=max(0.0, end_s - time.monotonic()))


class RemoteRank:
    """A rank whose process ends with the first rank."""

    def __init__(self, steps: RemoteSteps) -> None:
        self.begin = steps.begin

    def pool_memory(self) -> PoolMemory:
        raise ContractViolation("a rank that is a process has no tiers here")

    def close(self) -> None:
        pass
