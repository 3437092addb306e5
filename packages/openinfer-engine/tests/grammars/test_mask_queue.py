"""The queue of masks: fair over tenants and grammars by seconds, dropped when unwanted, urgent ones first."""

import threading
import weakref
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from openinfer_core.fair_queue import FairTurns
from openinfer_core.grammars import MaskWords
from openinfer_engine.grammars.mask_queue import MaskJob, MaskQueue

MASK = np.ones(1, np.uint32)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Work:
    """What a job computes: it notes that it ran, and takes some seconds of the clock."""

    def __init__(self, held: "Held", name: str, cost_s: float) -> None:
        self.held, self.name, self.cost_s = held, name, cost_s

    def __call__(self) -> Sequence[MaskWords]:
        self.held.clock.now_s += self.cost_s
        self.held.order.append(self.name)
        return [MASK]


class Held:
    """A queue of one thread, which waits for `go`."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.order: list[str] = []
        self.begun, self._go = threading.Event(), threading.Event()
        self.queue = MaskQueue(1, clock=self.clock)
        self.queue.submit([MaskJob("first", "first", self._hold)])
        assert self.begun.wait(60)
        self.jobs: list[MaskJob] = []

    def _hold(self) -> Sequence[MaskWords]:
        self.begun.set()
        self._go.wait()
        return [MASK]

    def job(self, tenant: str, group: str, *, cost_s: float = 1.0) -> MaskJob:
        return MaskJob(tenant, group, Work(self, f"{tenant}/{group}", cost_s))

    def submit(self, tenant: str, group: str, *, count: int = 1, cost_s: float = 1.0) -> None:
        jobs = [self.job(tenant, group, cost_s=cost_s) for _ in range(count)]
        self.jobs += jobs
        self.queue.submit(jobs)

    def go(self) -> list[str]:
        self._go.set()
        for job in self.jobs:
            self.queue.wait_for_any([job], 60)
        return self.order

    def end(self) -> None:
        self._go.set()
        self.queue.close()


@pytest.fixture
def held() -> Iterator[Held]:
    made = Held()
    yield made
    made.end()


def test_a_tenants_mask_waits_for_one_of_another_however_many_it_sent(held: Held) -> None:
    held.submit("a", "x", count=40)
    held.submit("b", "y")
    assert held.go().index("b/y") == 1


def test_tenants_take_turns_by_seconds_not_by_masks(held: Held) -> None:
    held.submit("dear", "x", count=4, cost_s=10.0)
    held.submit("cheap", "y", count=30, cost_s=1.0)
    order = held.go()
    assert order[: 1 + 10 + 1].count("dear/x") == 2
    assert [index for index, name in enumerate(order) if name == "dear/x"] == pytest.approx([0, 11, 22, 33], abs=2)


def test_within_a_tenant_a_grammar_with_many_states_weighs_one(held: Held) -> None:
    held.submit("a", "sixteen outputs", count=16)
    held.submit("a", "one output", count=2)
    order = held.go()
    assert [index for index, name in enumerate(order) if name == "a/one output"] == [1, 3]


def test_an_unwanted_mask_is_not_computed_and_frees_its_matcher(held: Held) -> None:
    work = Work(held, "unwanted", 1.0)
    freed = weakref.ref(work)
    job = MaskJob("a", "x", work)
    held.jobs.append(job)
    held.queue.submit([job])
    job.num_wanted += 1
    job.drop()
    assert freed() is work
    job.drop()
    del work
    assert freed() is None
    held.submit("b", "y")
    assert held.go() == ["b/y"]
    assert held.queue.mask_s["unwanted"] == 0.0


def test_a_mask_that_a_step_cannot_go_without_is_computed_first_and_once(held: Held) -> None:
    held.submit("a", "x", count=5)
    wanted = held.job("b", "late")
    held.jobs.append(wanted)
    held.queue.submit([wanted])
    waiter = threading.Thread(target=held.queue.wait_for, args=(wanted,))
    waiter.start()
    while not held.queue._urgent:  # noqa: SLF001 - that it waits shows nowhere else
        pass
    held._go.set()  # noqa: SLF001
    waiter.join(60)
    assert held.go()[0] == "b/late"
    assert held.order.count("b/late") == 1
    assert held.queue.num_pending == 0


def test_seconds_are_counted_by_what_became_of_the_mask(held: Held) -> None:
    def fail() -> Sequence[MaskWords]:
        held.clock.now_s += 4.0
        raise ValueError("no mask")

    refused, late = MaskJob("a", "x", fail), held.job("a", "x", cost_s=2.0)
    late.sat_out = True
    held.jobs += [refused, late]
    held.queue.submit([refused, late])
    held.submit("a", "x", cost_s=1.0)
    held.go()
    assert held.queue.mask_s == {"in_time": 1.0, "late": 2.0, "refused": 4.0, "unwanted": 0.0}
    assert isinstance(refused.error, ValueError)


def test_only_masks_that_no_step_has_waited_for_are_waited_for(held: Held) -> None:
    held.submit("a", "x")
    held.queue.wait_for_fresh(0.0)
    held.queue.wait_for_fresh(60.0)  # returns at once: what is pending has been waited for
    assert not held.jobs[0].is_done


def test_an_owner_that_comes_back_has_saved_nothing_up() -> None:
    turns: FairTurns[str] = FairTurns()
    for _ in range(3):
        turns.put("a", "a")
        share, _ = turns.take()
        share.end(10.0)
    turns.put("b", "b")
    turns.put("a", "a")
    turns.put("b", "b")
    order: list[str] = []
    while len(turns):
        share, item = turns.take()
        order.append(item)
        share.end(6.0)
    assert order == ["b", "b", "a"]


def test_an_owner_whose_item_is_worked_on_is_charged_though_others_are_taken_meanwhile() -> None:
    turns: FairTurns[str] = FairTurns()
    for name in ("a", "b", "c"):
        turns.put(name, name)
    share, first = turns.take()
    second_share, _ = turns.take()
    second_share.end(1.0)
    third_share, _ = turns.take()
    third_share.end(1.0)
    share.end(50.0)
    turns.put(first, first)
    turns.put("b", "b")
    assert turns.take()[1] == "b"
