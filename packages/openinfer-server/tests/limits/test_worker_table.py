"""Shares of several workers: what an owner holds in one counts in the others."""

import random
from collections import Counter

import msgspec
import pytest

from openinfer_core.request import RequestId
from openinfer_server.http.api_errors import ApiError
from openinfer_server.limits.admission import AdmissionControl
from openinfer_server.limits.shared_budget import SharedBudget
from openinfer_server.limits.worker_table import BUDGETS, WorkerTable
from openinfer_server.observability.metrics_snapshot import BudgetUse
from openinfer_server.workers.group import can_share_ports

pytestmark = pytest.mark.skipif(not can_share_ports(), reason="several workers are possible on Linux alone")
NUM_WORKERS = 3


@pytest.fixture
def tables() -> list[WorkerTable]:
    created = WorkerTable.create(NUM_WORKERS)
    # With a key that is drawn two owners of a test have one slot in one run of a hundred.
    return [
        WorkerTable(msgspec.structs.replace(created.access_of(worker), key=b"k" * 16)) for worker in range(NUM_WORKERS)
    ]


def budgets(tables: list[WorkerTable], name: str, limit: int, *, per_worker: bool = False) -> list[SharedBudget]:
    made = [SharedBudget(name, limit, unit="things", per_worker=per_worker) for _ in tables]
    for budget, table in zip(made, tables, strict=True):
        budget.share(table)
    return made


def take_all(workers: list[SharedBudget], owner: str) -> int:
    """How many an owner gets that spreads them over all workers."""
    taken = refused = 0
    while refused < len(workers):
        refused = 0
        for worker in workers:
            try:
                worker.take(owner, 1)
                taken += 1
            except ApiError:
                refused += 1
    return taken


def test_share_of_one_limit_is_that_of_one_worker(tables: list[WorkerTable]) -> None:
    workers = budgets(tables, "body_bytes", 1024)
    assert [take_all(workers, owner) for owner in ("a", "b", "c")] == [768, 192, 48]
    assert [worker.used_by_all for worker in workers] == [1008] * NUM_WORKERS
    uses = [worker.use for worker in workers]
    assert sum(use.used for use in uses) == 1008
    assert sum(use.limit for use in uses) == 1024


def test_limit_of_each_worker_is_divided_there_and_over_all(tables: list[WorkerTable]) -> None:
    workers = budgets(tables, "requests", 1024, per_worker=True)
    assert take_all(workers[:1], "a") == 768  # one that all connections of an owner lead to keeps a quarter free
    assert take_all(workers, "a") == NUM_WORKERS * 768 - 768
    assert take_all(workers, "b") == NUM_WORKERS * 192
    assert sum(worker.use.limit for worker in workers) == NUM_WORKERS * 1024


def test_what_is_given_back_is_there_in_all_workers(tables: list[WorkerTable]) -> None:
    rng = random.Random(1)
    workers = budgets(tables, "queued_tokens", 10_000)
    taken: Counter[tuple[int, str]] = Counter()
    for _ in range(3000):
        place, owner = rng.randrange(NUM_WORKERS), rng.choice("abcdefgh")
        if taken[place, owner] and rng.random() < 0.5:
            workers[place].give_back(owner, taken.pop((place, owner)))
        else:
            amount = rng.randrange(1, 50)
            workers[place].hold(owner, amount)
            taken[place, owner] += amount
        assert all(worker.used_by_all == taken.total() for worker in workers)
        assert workers[place].held(owner) == sum(taken[other, owner] for other in range(NUM_WORKERS))


def test_workers_that_died_hold_nothing(tables: list[WorkerTable]) -> None:
    workers = budgets(tables, "requests", 8, per_worker=True)
    for worker in workers:
        worker.take("a", 2)
    tables[0].clear(2)
    assert workers[0].held("a") == workers[0].used_by_all == 4
    assert workers[2].held("a") == 6  # its own books, which died with it


def test_queue_is_one_queue(tables: list[WorkerTable]) -> None:
    workers = [AdmissionControl(max_requests=8, max_tokens=1000) for _ in tables]
    for worker, table in zip(workers, tables, strict=True):
        worker.share(table)
    for index in range(6):
        workers[index % NUM_WORKERS].check_room("a", 10)
        workers[index % NUM_WORKERS].enter(RequestId(index), "a", 10)
    for worker in workers:
        with pytest.raises(ApiError, match="6 requests are waiting; 6 of them are yours"):
            worker.check_room("a", 10)
        worker.check_room("b", 10)
        assert worker.num_tokens == 60
    with pytest.raises(ApiError, match="do not fit"):
        workers[0].check_room("b", 900)  # the queue is not empty, though nothing of this worker may be in it
    assert workers[1].uses()[0] == BudgetUse(budget="queued_requests", used=2, limit=0, refused=1)


def test_every_shared_budget_has_a_place(tables: list[WorkerTable]) -> None:
    for name in BUDGETS:
        first, second, _ = budgets(tables, name, 100)
        first.take("owner", 5)
        assert second.held("owner") == 5
        assert second.held("other") == 0
        first.give_back("owner", 5)
