"""The queue of threads: fair over owners by seconds, whatever the order and number of what they submit."""

import gc
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import CancelledError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openinfer_core.fair_queue import FairQueue, FairTurns, Share


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
        begun = threading.Event()
        self.queue.submit("first", lambda: (begun.set(), self._go.wait()))
        begun.wait(60)

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
    queue.close()
    for future in waiting:
        with pytest.raises(CancelledError):
            future.result(60)
    go.set()
    queue.join()
    assert running.done()
    assert queue.submit("a", lambda: None).cancelled()


def test_what_ran_while_nothing_waited_is_charged(held: Held) -> None:
    """One that submits a dear piece of work after the other has no more than its share of seconds."""

    def dear() -> None:
        held.submit("dear", 4.0)
        if held.order.count("dear") < 9:
            held.queue.submit("dear", dear)

    held.queue.submit("dear", dear)
    held.submit("cheap", 1.0, count=20)
    order = held.go()
    assert order[:10].count("dear") <= 3


def test_several_threads_take_from_one_queue() -> None:
    queue = FairQueue("test", num_threads=2)
    meeting = threading.Barrier(2)
    for future in [queue.submit("a", lambda: meeting.wait(60)) for _ in range(2)]:
        future.result(60)
    queue.close()
    queue.join()


class Text:
    """Something that work refers to."""


def test_cancelled_work_is_dropped_before_a_thread_comes_to_it(held: Held) -> None:
    text = Text()
    seen = weakref.ref(text)
    future = held.queue.submit("a", lambda text=text: held.order.append(str(text)))
    del text
    assert held.queue.num_waiting == 1
    assert future.cancel()
    assert held.queue.num_waiting == 0
    gc.collect()
    assert seen() is None


def test_thread_that_waits_keeps_nothing_of_what_it_did() -> None:
    queue = FairQueue("test")
    text = Text()
    seen = weakref.ref(text)
    future = queue.submit("a", lambda text=text: text)
    assert future.result(60) is text
    queue.submit("b", lambda: None).result(60)  # so that it has left the first, and is in the second or after it
    del text, future
    gc.collect()
    assert seen() is None
    queue.close()
    queue.join()


def test_last_work_is_let_go_of_while_the_thread_waits() -> None:
    queue = FairQueue("test")
    text = Text()
    gone = threading.Event()
    weakref.finalize(text, gone.set)
    queue.submit("a", lambda text=text: None).result(60)
    del text
    assert gone.wait(60)
    queue.close()
    queue.join()


@given(
    st.lists(
        st.tuples(st.sampled_from(["put", "take", "withdraw"]), st.integers(0, 5), st.integers(0, 30)), max_size=60
    )
)
def test_least_order_of_an_owner_is_next_then_the_first_that_came(steps: list[tuple[str, int, int]]) -> None:
    turns: FairTurns[int] = FairTurns()
    waiting: list[tuple[int, int]] = []  # (order, number), as they came
    tickets: dict[int, tuple[Share[int], int]] = {}
    for number, (step, order, place) in enumerate(steps):
        if step == "put":
            tickets[number] = turns.put("a", number, order=order)
            waiting.append((order, number))
        elif waiting and step == "take":
            share, taken = turns.take()
            share.end(0.0)
            waiting.sort(key=lambda each: each[0])  # stable
            assert taken == waiting.pop(0)[1]
            waiting.sort(key=lambda each: each[1])
        elif waiting:
            _, withdrawn = waiting.pop(place % len(waiting))
            turns.withdraw(*tickets[withdrawn])
        assert len(turns) == len(waiting)


def test_what_began_first_is_done_first_in_all_its_pieces(held: Held) -> None:
    """Two of three pieces each, the next of which is submitted when the last one is done."""
    over = threading.Event()

    def submit(name: str, begin_s: float, number: int) -> None:
        held.queue.submit("a", lambda: piece(name, begin_s, number), order_s=begin_s)

    def piece(name: str, begin_s: float, number: int) -> None:
        held.order.append(f"{name} {number}")
        if number < 2:
            submit(name, begin_s, number + 1)
        elif name == "late":
            over.set()

    submit("late", 2.0, 0)
    submit("early", 1.0, 0)
    held.go()
    assert over.wait(60)
    assert held.order == ["early 0", "early 1", "early 2", "late 0", "late 1", "late 2"]
