"""What requests that wait will load is brought up before their turn: in bounds, once, and for nothing that has left."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from openinfer_core import GenerateRequest, RequestId, SamplingParams
from openinfer_core.scheduling import SchedulerConfig
from openinfer_engine.scheduler import TokenBudgetScheduler
from openinfer_engine.scheduler.prefetches import MAX_WAITING, MAX_WINDOWS, WINDOW_BLOCKS, Prefetches
from openinfer_kv_cache import Digest, PortPrefetch, PrefetchingPort, PrefixHit, TierTransfer
from openinfer_kv_cache.testing.fake_tier_port import TieredDriver


@dataclass(eq=False)
class Transfer:
    """A window on its way up."""

    digests: tuple[Digest, ...]
    fast: set[Digest]
    begin_s: float = 0.0
    completed_blocks: int = 0
    is_cancelled: bool = False
    has_ended: bool = False

    @property
    def num_blocks(self) -> int:
        return len(self.digests)

    def is_over(self) -> bool:
        return self.has_ended

    def end(self, completed_blocks: int) -> None:
        self.has_ended, self.completed_blocks = True, completed_blocks
        self.fast.update(self.digests[:completed_blocks])

    def cancel(self) -> None:
        self.is_cancelled = True

    def wait(self, timeout_s: float) -> None: ...


@dataclass(eq=False)
class Port:
    """Two tiers, of which the slow one has what the fast one has not."""

    fast: set[Digest]
    slow: set[Digest]
    prefetch_blocks: int
    asked: list[Digest] = field(default_factory=list[Digest])
    transfers: list[Transfer] = field(default_factory=list[Transfer])
    chunks_per_slot: int = 0

    def prefetch(self, digests: Sequence[Digest]) -> PortPrefetch:
        assert 0 < len(digests) <= WINDOW_BLOCKS
        held = 0
        while held < len(digests) and digests[held] in self.fast | self.slow:
            held += 1
        self.asked += digests
        up = tuple(each for each in digests[:held] if each not in self.fast)
        if not up:
            return PortPrefetch(held, None)
        self.transfers.append(Transfer(up, self.fast))
        return PortPrefetch(held, self.transfers[-1])

    def find(self, digests: Sequence[Digest]) -> PrefixHit:
        raise AssertionError("not asked")

    def load(self, found: PrefixHit, places: Sequence[int]) -> TierTransfer | None:
        raise AssertionError("not asked")

    def save(self, digests: Sequence[Digest], places: Sequence[int]) -> TierTransfer | None:
        raise AssertionError("not asked")

    def state_places(self, slot: int) -> Sequence[int]:
        raise AssertionError("not asked")

    def clock(self) -> float:
        return 0.0

    @property
    def under_way(self) -> list[Transfer]:
        return [each for each in self.transfers if not each.has_ended and not each.is_cancelled]


class Kv:
    def __init__(self, digests: Sequence[Digest], num_cached: int) -> None:
        self._digests, self._num_cached = digests, num_cached

    def count_cached_tokens(self) -> int:
        return 16 * self._num_cached

    def matchable_digests(self) -> Sequence[Digest]:
        return self._digests


class Waits:
    """What is asked of a sequence."""

    def __init__(self, digests: Sequence[Digest], *, num_cached: int = 0, may_match: bool = True) -> None:
        self.kv, self.may_match = Kv(digests, num_cached), may_match
        self.digests = digests


def chain(name: int, num_blocks: int) -> tuple[Digest, ...]:
    return tuple(Digest(b"%d/%d" % (name, number)) for number in range(num_blocks))


def make(digests: Sequence[Digest], *, fast: Sequence[Digest] = (), room: int = 10_000) -> tuple[Port, Any]:
    port = Port(set(fast), set(digests) - set(fast), room)
    assert isinstance(port, PrefetchingPort)
    return port, Prefetches(port, block_size_tokens=16)


def test_a_chain_comes_up_window_after_window() -> None:
    digests = chain(0, 176)
    port, prefetches = make(digests)
    waiting: Any = [Waits(digests)]
    for _ in range(2):
        prefetches.advance(waiting)
        assert [each.num_blocks for each in port.under_way] == [32, 32, 32, 32]
    for number, under_way in ((2, [32, 32, 32, 32]), (0, [32, 32, 32, 16])):
        port.under_way[number].end(32)
        prefetches.advance(waiting)
        assert [each.num_blocks for each in port.under_way] == under_way
    for transfer in port.under_way:
        transfer.end(transfer.num_blocks)
    prefetches.advance(waiting)
    assert (prefetches.prefetched_blocks, prefetches.waiting_blocks, port.asked) == (176, 176, list(digests))


def test_what_the_pool_or_the_fast_tier_has_is_passed_over() -> None:
    digests = chain(0, 200)
    port, prefetches = make(digests, fast=digests[:100])
    prefetches.advance([Waits(digests, num_cached=20)])
    assert [each.digests[0] for each in port.transfers] == [digests[at] for at in (100, 116, 148, 180)]
    assert port.asked[0] == digests[20]


def test_nothing_is_asked_beyond_what_the_tiers_have() -> None:
    digests = chain(0, 100)
    port, prefetches = make(digests[:40])
    waiting: Any = [Waits(digests)]
    prefetches.advance(waiting)
    assert (len(port.transfers), len(port.asked)) == (2, 64)  # of four windows, of which the second ends the chain
    assert [each.num_blocks for each in port.transfers] == [32, 8]


def test_nothing_is_asked_after_a_failure() -> None:
    digests = chain(0, 300)
    port, prefetches = make(digests)
    waiting: Any = [Waits(digests)]
    prefetches.advance(waiting)
    port.transfers[0].end(3)
    for _ in range(3):
        prefetches.advance(waiting)
    assert (len(port.transfers), prefetches.prefetched_blocks) == (4, 3)


def test_the_first_that_wait_have_no_more_than_the_port_says_together() -> None:
    chains = [chain(name, 50) for name in range(6)]
    port, prefetches = make([each for digests in chains for each in digests], room=100)
    waiting: Any = [Waits(digests) for digests in chains]
    for _ in range(20):
        prefetches.advance(waiting)
        for transfer in port.under_way:
            transfer.end(transfer.num_blocks)
    assert len(port.fast) == 100
    assert not port.fast & {*chains[4], *chains[5]}
    prefetches.advance(waiting[1:])  # the first one's turn has come: there is room for others
    assert port.under_way
    assert prefetches.waiting_blocks <= 100


def test_a_request_that_leaves_takes_its_window_with_it() -> None:
    digests = chain(0, 64)
    port, prefetches = make(digests)
    prefetches.advance([Waits(digests)])
    prefetches.advance([])
    assert port.transfers[0].is_cancelled
    assert prefetches.waiting_blocks == 0


@pytest.mark.parametrize("waiting", [Waits(chain(0, 64), may_match=False), Waits(chain(0, 0))])
def test_a_request_without_a_prefix_is_passed_over(waiting: Any) -> None:
    port, prefetches = make(chain(0, 64))
    prefetches.advance([waiting])
    assert not port.asked


def waits_for_another(driver_of: Callable[..., TieredDriver], *, waits: bool = True, **fields: Any) -> TieredDriver:
    """A request whose prompt is in a slow tier waits, since another has the pool."""
    driver = driver_of(**fields)
    prompt = tuple(range(1, 34))
    driver.submit(make_generation(0, prompt, max_tokens=1))
    driver.run()
    driver.submit(make_generation(1, tuple(range(100, 133)), max_tokens=20))  # pushes it out, and goes on
    driver.step()
    driver.submit(make_generation(2, (*prompt, 40), max_tokens=2))
    for _ in range(6):
        driver.step()
    assert (driver.scheduler.stats().waiting > 0) is waits
    return driver


@pytest.fixture
def driver_of() -> Callable[..., TieredDriver]:
    def made(*, num_blocks: int = 14, prefetch_blocks: int = 6, **fields: Any) -> TieredDriver:
        config = SchedulerConfig(
            num_blocks=num_blocks,
            block_size_tokens=4,
            max_num_seqs=4,
            max_step_tokens=64,
            max_model_tokens=56,
            **fields,
        )
        return TieredDriver(TokenBudgetScheduler, config, prefetch_blocks=prefetch_blocks)

    return made


def make_generation(number: int, prompt: tuple[int, ...], *, max_tokens: int) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=max_tokens)
    return GenerateRequest(request_id=RequestId(number), prompt_token_ids=prompt, sampling=sampling)


def test_scheduler_brings_up_what_waits_and_loads_it_then(driver_of: Callable[..., TieredDriver]) -> None:
    driver = waits_for_another(driver_of)
    brought = driver.scheduler.stats().prefetched_blocks
    assert (brought, driver.scheduler.stats().tier_tokens) == (6, 0)  # of eight
    driver.run()
    assert driver.scheduler.stats().tier_tokens == 32
    assert driver.accounts[RequestId(2)].scheduled is not None


def test_scheduler_brings_up_nothing_where_nothing_waits_or_tables_are_several(
    driver_of: Callable[..., TieredDriver],
) -> None:
    assert not waits_for_another(driver_of, waits=False, num_blocks=64).port.prefetches
    assert not waits_for_another(driver_of, prefetch_blocks=0).port.prefetches
    assert not waits_for_another(driver_of, num_blocks=26, table_windows=(None, 8)).port.prefetches


class PrefetchMachine(RuleBasedStateMachine):
    """Any order of arrivals, turns, ends of transfers and plans."""

    @initialize(room=st.integers(1, 90), num_fast=st.integers(0, 60))
    def make(self, *, room: int, num_fast: int) -> None:
        self.chains = [chain(name, 15 * name) for name in range(8)]
        every = [each for digests in self.chains for each in digests]
        self.port, self.prefetches = make(every, fast=every[:num_fast], room=room)
        self.queue: list[Any] = []
        self.planned: list[Any] = []

    @rule(name=st.integers(0, 7), num_cached=st.integers(0, 3), unknown=st.booleans(), may_match=st.booleans())
    def arrive(self, *, name: int, num_cached: int, unknown: bool, may_match: bool) -> None:
        digests = self.chains[name] + (chain(100 + name, 10) if unknown else ())
        self.queue.append(Waits(digests, num_cached=min(num_cached, len(digests)), may_match=may_match))

    @precondition(lambda self: self.queue)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.queue.pop(data.draw(st.integers(0, len(self.queue) - 1)))

    @rule()
    def plan(self) -> None:
        self.planned = list(self.queue)
        self.prefetches.advance(self.queue)

    @precondition(lambda self: any(not each.has_ended for each in self.port.transfers))
    @rule(data=st.data(), fails=st.booleans())
    def end(self, data: st.DataObject, *, fails: bool) -> None:
        transfer = data.draw(st.sampled_from([each for each in self.port.transfers if not each.has_ended]))
        transfer.end(transfer.num_blocks // 2 if fails or transfer.is_cancelled else transfer.num_blocks)

    @invariant()
    def bounds_hold(self) -> None:
        assert self.prefetches.waiting_blocks <= self.port.prefetch_blocks
        assert len(self.port.under_way) <= MAX_WINDOWS
        first = [each for each in self.planned if each.may_match][:MAX_WAITING]
        known = {digest for each in first for digest in each.digests}
        assert all(known.issuperset(transfer.digests) for transfer in self.port.under_way)

    def teardown(self) -> None:
        """Left alone, the first of the queue get all that the bound lets them have."""
        for _ in range(60):
            self.plan()
            for transfer in self.port.under_way:
                transfer.end(transfer.num_blocks)
        first = [each for each in self.queue if each.may_match][:1]
        if first and not any(
            each.has_ended and each.completed_blocks < each.num_blocks for each in self.port.transfers
        ):
            mine = first[0].digests[first[0].kv.count_cached_tokens() // 16 :]
            held = next((at for at, each in enumerate(mine) if each not in self.port.fast | self.port.slow), len(mine))
            up = [each in self.port.fast for each in mine[:held]]
            assert all(up) or self.prefetches.waiting_blocks == self.port.prefetch_blocks


def test_any_order_of_arrivals_and_ends() -> None:
    run_state_machine_as_test(
        PrefetchMachine,
        settings=settings(
            max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
        ),
    )
