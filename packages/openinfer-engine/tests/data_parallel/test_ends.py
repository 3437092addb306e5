"""The end of data-parallel ranks: each is closed where its device is the current one, whatever has failed before."""

import threading
from typing import Any, cast

from openinfer_core.scheduling import StepPlan
from openinfer_engine.data_parallel.runner import StepRound, ThreadRank
from openinfer_engine.distributed.expert_group import DataParallelCommunicator
from openinfer_engine.distributed.local_group import LocalGroup

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
