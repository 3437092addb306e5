"""Data-parallel ranks of which all but the first are processes: loading them, and their end."""

from collections.abc import Sequence

from openinfer_core.errors import ContractViolation
from openinfer_engine.data_parallel.remote_rank import RemoteSteps
from openinfer_engine.data_parallel.runner import SharedRank, ThreadRank
from openinfer_engine.distributed.expert_group import DataParallelCommunicator
from openinfer_engine.engine_plan import EnginePlan
from openinfer_engine.kv_tiers.pool import PoolMemory
from openinfer_engine.kv_tiers.share import TellingShare
from openinfer_engine.tracing.trace import Tracer
from openinfer_engine.worker.process_group import ProcessGroup
from openinfer_engine.worker.process_runner import load_first_rank


def load_ranks(engine_plan: EnginePlan, processes: ProcessGroup, tracer: Tracer) -> Sequence[SharedRank]:
    """Loads rank 0 while the other ranks load; closing it closes them all.

    Raises:
        Refused: a rank cannot be had.
        GroupBroken: the process of a rank died.
    """
    size = engine_plan.options.data_parallel_size
    ticket, others = engine_plan.backend.open_group(size)
    communicator = DataParallelCommunicator(others)
    worker = load_first_rank(engine_plan, processes, tracer, ticket, communicator)
    first = ThreadRank(0, worker, communicator, engine_plan.backend.enter_thread)
    return [FirstRank(first, processes), *map(RemoteRank, processes.steps, processes.shares)]


class FirstRank:
    """The rank of the engine's process, and the end of all."""

    share = None

    def __init__(self, rank: ThreadRank, processes: ProcessGroup) -> None:
        self.begin = rank.begin
        self.pool_memory = rank.pool_memory
        self._rank = rank
        self._processes = processes

    def close(self) -> None:
        """Lets the other ranks leave; `GroupBroken` if this one hangs."""
        self._processes.leave()
        self._processes.close_after(self._rank.begin_close())


class RemoteRank:
    """A rank whose process ends with the first rank."""

    def __init__(self, steps: RemoteSteps, share: TellingShare) -> None:
        self.begin = steps.begin
        self.share = share

    def pool_memory(self) -> PoolMemory:
        raise ContractViolation("a rank that is a process has its pool there")

    def close(self) -> None:
        pass
