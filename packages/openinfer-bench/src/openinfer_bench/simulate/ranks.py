"""Ranks of a simulated engine: the processes and pipes are the engine's own, the GPUs and what joins them are not.

    rank 0: ProcessRunner, ProcessGroup ──pipes──► rank 1, …: orders, answers, a follower
                   └──────────── arrive(step, digest of the plan) ────────────┘  as in a collective

A follower computes nothing. It says which plan it was told, and a step is over when all ranks have said the same.
"""

import hashlib
from collections.abc import Callable
from typing import Any

import msgspec

from openinfer_bench.simulate.device import SimulatedRunner
from openinfer_core.process.wire import encode_frame
from openinfer_core.scheduling import StepPlan, StepResult
from openinfer_core.testing.errors import ConformanceError
from openinfer_core.testing.simulation.processes import Child
from openinfer_core.testing.simulation.world import Task, World
from openinfer_engine.errors import GroupBroken
from openinfer_engine.kv_tiers.pool import PoolMemory
from openinfer_engine.kv_tiers.share_service import ShareService
from openinfer_engine.worker import process as rank_process
from openinfer_engine.worker.messages import Agree, Build, Resolved, RunStep, WorkerReady
from openinfer_engine.worker.process_group import ProcessGroup
from openinfer_engine.worker.process_runner import ProcessRunner
from openinfer_engine.worker.runner import DoneStep, PendingStep, Runner, Worker

_JOIN_S = 0.3
_NUM_BLOCKS = 1  # a follower has none; what the group agrees on is rank 0's own affair here


class RankSpec(msgspec.Struct, frozen=True):
    """In place of an `EngineSpec`: a follower is the same for all."""


class Meeting:
    """What stands for the collectives of a group: rank 0 waits in each step until all others have run it."""

    def __init__(self, world: World, num_followers: int) -> None:
        self._world = world
        self._num_followers = num_followers
        self._arrived: dict[int, list[bytes]] = {}  # by step
        self._waiting: Task | None = None
        self._failure: BaseException | None = None

    def arrive(self, plan: StepPlan) -> None:
        """A follower has run a step."""
        self._arrived.setdefault(plan.step, []).append(_digest(plan))
        self._wake()

    def wait(self, plan: StepPlan) -> None:
        """For rank 0.

        Raises:
            ConformanceError: another rank was told another plan. GroupBroken: a rank is gone.
        """
        while len(self._arrived.get(plan.step, ())) < self._num_followers:
            if self._failure is not None:
                raise GroupBroken(str(self._failure))
            self._waiting = self._world.current
            self._world.park()
        if any(digest != _digest(plan) for digest in self._arrived.pop(plan.step)):
            raise ConformanceError(f"a rank has run another step {plan.step} than rank 0")

    def abort(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._wake()

    def _wake(self) -> None:
        if self._waiting is not None:
            self._world.wake(self._waiting)


def _digest(plan: StepPlan) -> bytes:
    return hashlib.blake2b(bytes(encode_frame(RunStep.of(plan))), digest_size=16).digest()


class _RankZero:
    """Rank 0's worker: the GPU that is looked at."""

    adapters = None

    def __init__(self, gpu: SimulatedRunner, meeting: Meeting) -> None:
        self._gpu = gpu
        self._meeting = meeting

    def launch(self, plan: StepPlan) -> PendingStep:
        return _MetStep(self._gpu.launch(plan), self._meeting, plan)

    def pool_memory(self) -> PoolMemory:
        raise NotImplementedError("its tiers have its blocks already")

    def fence(self) -> Callable[[], None]:
        return lambda: None

    def close(self) -> None:
        self._gpu.close()


class _MetStep:
    def __init__(self, pending: PendingStep, meeting: Meeting, plan: StepPlan) -> None:
        self._pending = pending
        self._meeting = meeting
        self._plan = plan

    def result(self) -> StepResult:
        self._meeting.wait(self._plan)
        return self._pending.result()


class _Follower:
    """Another rank's worker."""

    adapters = None

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting

    def launch(self, plan: StepPlan) -> PendingStep:
        self._meeting.arrive(plan)
        return DoneStep(None)  # type: ignore[arg-type] # its result is not asked for

    def pool_memory(self) -> PoolMemory:
        raise NotImplementedError("a follower has no blocks")

    def fence(self) -> Callable[[], None]:
        return lambda: None

    def close(self) -> None:
        pass


def start_ranks(world: World, gpu: SimulatedRunner, num_ranks: int) -> Runner:
    """The runner of so many ranks, in the engine's process.

    Raises:
        GroupBroken: one died before it was ready.
    """
    if num_ranks == 1:
        return gpu
    meeting: Any = Meeting(world, num_ranks - 1)
    world.process.notes["meeting"] = meeting
    group = ProcessGroup(RankSpec(), num_ranks - 1)  # type: ignore[arg-type]
    try:
        group.smallest_pool(_NUM_BLOCKS)
        group.agree(_NUM_BLOCKS, b"", meeting)
        group.wait_ready()
    except BaseException:
        group.close(deadline_s=0)
        raise
    return ProcessRunner(_RankZero(gpu, meeting), group)


def run_rank(world: World, child: Child, meeting: Meeting) -> int:
    """The program of a rank."""

    def load(orders: rank_process.Orders, answers: rank_process.Answers) -> tuple[Worker, ShareService | None]:
        orders.take(Build)
        answers.send(Resolved(_NUM_BLOCKS))
        orders.take(Agree)
        world.sleep(_JOIN_S)
        answers.send(WorkerReady())
        return _Follower(meeting), None

    return rank_process.serve_engine(child.stdin.fileno(), child.stdout.fileno(), load)
