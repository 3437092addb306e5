"""The end of data-parallel ranks: each is closed where its device is the current one, and one that failed ends all."""

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, NoReturn, cast

import numpy as np
import pytest

from openinfer_core.scheduling import StepPlan, StepResult
from openinfer_engine.data_parallel.runner import StepRound, ThreadRank
from openinfer_engine.distributed.expert_group import DataParallelCommunicator
from openinfer_engine.distributed.local_group import LocalGroup
from openinfer_engine.worker.runner import DoneStep, PendingStep

RANKS = 2


class FakeWorker:
    """Notes in which threads it was used."""

    def __init__(self) -> None:
        self.used: list[threading.Thread] = []

    def launch(self, plan: StepPlan) -> None:
        raise NotImplementedError

    def join_step(self) -> None: ...

    def close(self) -> None:
        self.used.append(threading.current_thread())


def test_a_rank_is_closed_in_its_own_thread() -> None:
    entered: list[threading.Thread] = []
    workers = [FakeWorker() for _ in range(RANKS)]
    communicators = [DataParallelCommunicator(each) for each in LocalGroup(RANKS).communicators]
    enter = [lambda: entered.append(threading.current_thread())] * RANKS
    parts = zip(cast("list[Any]", workers), communicators, enter, strict=True)
    for each in StepRound([ThreadRank(index, *each) for index, each in enumerate(parts)]).runners:
        each.close()
    assert [worker.used for worker in workers] == [[thread] for thread in entered]
    assert len({*entered}) == RANKS
    assert threading.current_thread() not in entered


class Elsewhere:
    """A rank whose steps end when the test ends them."""

    share = None

    def __init__(self) -> None:
        self.steps: list[Future[PendingStep | None]] = []

    def begin(self, plan: StepPlan | None, counts: Sequence[int], *, is_decode: bool) -> Future[PendingStep | None]:
        del plan, counts, is_decode
        self.steps.append(Future())
        return self.steps[-1]

    def pool_memory(self) -> NoReturn:
        raise NotImplementedError

    def close(self) -> None: ...


class Watch:
    """Of ranks in other processes; it keeps the cause of what a rank raises as it is."""

    failure: BaseException | None = None

    def raise_cause(self, error: BaseException) -> NoReturn:
        raise error


def begun(watch: Watch | None) -> tuple[Sequence[Elsewhere], PendingStep]:
    """Two ranks in a step, and the one of the second rank."""
    ranks = [Elsewhere(), Elsewhere()]
    step_round = StepRound(ranks, watch)
    columns = ("starts", "counts", "num_host_tokens", "max_new", "new_block_counts")
    one, ids = np.ones(1, np.int32), np.asarray([5], np.int32)
    plan = StepPlan(step=1, slots=ids, token_ids=ids, new_blocks=ids, started=(), **dict.fromkeys(columns, one))
    pending = step_round.runners[1].launch(plan)
    assert step_round.launch()
    return ranks, pending


def result() -> StepResult:
    return StepResult(new_counts=np.ones(1, np.int32), token_ids=np.asarray([7], np.int32))


def test_a_rank_that_fails_here_is_told_of_while_one_elsewhere_waits_for_it() -> None:
    (first, _), pending = begun(Watch())
    first.steps[0].set_exception(MemoryError("no room"))
    with pytest.raises(MemoryError, match="no room"):
        pending.result()


def test_what_was_computed_after_a_rank_had_gone_is_no_result() -> None:
    watch = Watch()
    (first, second), pending = begun(watch)
    first.steps[0].set_result(None)
    second.steps[0].set_result(DoneStep(result()))
    assert pending.result().token_ids.tolist() == [7]
    watch.failure = ConnectionError("rank 1 has died")
    with pytest.raises(ConnectionError, match="rank 1 has died"):
        pending.result()
