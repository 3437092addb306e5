"""The compiler's queue: fair over tenants by seconds, whatever the order and number of what they send."""

import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError

import pytest

from openinfer_core.fair_queue import FairQueue


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Held:
    """A queue whose thread waits for `go`, and the order in which work was done."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.order: list[str] = []
        self._go = threading.Event()
        self.queue = FairQueue("test", clock=self.clock)
        self.queue.submit("first", self._go.wait)

    def submit(self, tenant: str, cost_s: float = 1.0, count: int = 1) -> None:
        for _ in range(count):
            self.queue.submit(tenant, lambda: self._work(tenant, cost_s))

    def go(self) -> list[str]:
        done = self.queue.submit("last", lambda: None)
        self._go.set()
        done.result(60)
        while self.queue.num_waiting:
            self.queue.submit("last", lambda: None).result(60)
        return self.order

    def end(self) -> None:
        self._go.set()
        self.queue.close()

    def _work(self, tenant: str, cost_s: float) -> None:
        self.clock.now_s += cost_s
        self.order.append(tenant)


@pytest.fixture
def held() -> Iterator[Held]:
    made = Held()
    yield made
    made.end()


def test_first_of_a_tenant_waits_for_one_of_another_however_many_it_sent(held: Held) -> None:
    held.submit("a", count=70)
    held.submit("b")
    order = held.go()
    assert order[:3].count("b") == 1
    assert order.count("a") == 70


def test_tenants_share_seconds_and_not_grammars(held: Held) -> None:
    held.submit("slow", 4.0, count=10)
    held.submit("quick", 1.0, count=40)
    assert held.go() == ["slow", "quick", "quick", "quick", "quick"] * 10


def test_what_a_tenant_did_not_use_is_not_saved_up(held: Held) -> None:
    held.submit("a", count=10)
    held.queue.submit("a", lambda: held.submit("b", count=5))
    held.submit("a", count=10)
    order = held.go()
    assert order[:10] == ["a"] * 10
    assert order[10:20] in (["a", "b"] * 5, ["b", "a"] * 5)


def test_exceptions_are_the_futures_and_cancelled_work_is_not_done(held: Held) -> None:
    def fail() -> None:
        raise ValueError("injected")

    failing = held.queue.submit("a", fail)
    cancelled = held.queue.submit("a", lambda: held.order.append("cancelled"))
    assert cancelled.cancel()
    assert held.go() == []
    with pytest.raises(ValueError, match="injected"):
        failing.result(60)


def test_closing_cancels_what_waits() -> None:
    begun, go = threading.Event(), threading.Event()
    queue = FairQueue("test")
    running = queue.submit("a", lambda: (begun.set(), go.wait()))
    waiting = [queue.submit("a", lambda: None) for _ in range(3)]
    assert begun.wait(60)
    closing = threading.Thread(target=queue.close)
    closing.start()
    for future in waiting:
        with pytest.raises(CancelledError):
            future.result(60)
    go.set()
    closing.join(60)
    assert running.done()
    assert queue.submit("a", lambda: None).cancelled()
