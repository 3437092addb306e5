"""Adapters and their slots: who runs, who waits, and for how long at most; in virtual time."""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import pytest

from openinfer_core import GenerateRequest, RequestId, SamplingParams
from openinfer_core.events import Failed, FailureKind, Finished, Scheduled, TokenEvent
from openinfer_core.queue_policies import FairShare, FirstComeFirstServed
from openinfer_core.request import LoadedAdapter
from openinfer_core.scheduling import QueuePolicy, QueuePolicyConfig, SchedulerConfig, StepPlan, StepResult
from openinfer_engine.scheduler import TokenBudgetScheduler
from openinfer_engine.scheduler.order.bypass import MAX_BYPASS_REQUESTS, MAX_BYPASS_S

STEP_S = 0.02


@dataclass
class Port:
    """Adapters in host memory: each is held so many calls of `is_held` after it was asked for."""

    delay: int = 0
    asked: dict[bytes, int] = field(default_factory=dict)
    pinned: list[bytes] = field(default_factory=list)
    released: list[bytes] = field(default_factory=list)

    def is_held(self, digest: bytes) -> bool:
        if digest in self.asked:
            self.asked[digest] -= 1
        return self.delay == 0 or self.asked.get(digest, 1) <= 0

    def hold(self, digest: bytes) -> None:
        self.asked.setdefault(digest, self.delay)

    def pin(self, digest: bytes) -> None:
        self.pinned.append(digest)

    def unpin(self, digest: bytes) -> None:
        self.pinned.remove(digest)

    def release(self, digest: bytes) -> None:
        self.released.append(digest)


def digest_of(adapter: int) -> bytes:
    return adapter.to_bytes(16, "big")


class World:
    """A scheduler, a clock, and a device that knows what lies in its slots and looks at every row."""

    def __init__(
        self,
        scheduler: type[TokenBudgetScheduler],
        *,
        num_slots: int,
        policy: QueuePolicy | None = None,
        port: Port | None = None,
        max_num_seqs: int = 16,
        max_step_tokens: int = 256,
    ) -> None:
        config = SchedulerConfig(
            num_blocks=2048,
            block_size_tokens=4,
            max_num_seqs=max_num_seqs,
            max_step_tokens=max_step_tokens,
            max_model_tokens=256,
            max_waiting=4096,
            max_adapters=num_slots,
        )
        self.scheduler = scheduler(config, policy or FirstComeFirstServed(QueuePolicyConfig()))
        self.port = port or Port()
        self.scheduler.use_adapters(self.port)
        self.now_s = 0.0
        self.slots: dict[int, bytes] = {}  # of adapters
        self.rows: dict[int, GenerateRequest] = {}  # by sequence slot
        self.in_flight: deque[StepPlan] = deque()
        self.waits_s: dict[int, float] = {}
        self.ended: dict[int, TokenEvent] = {}
        self.requests: dict[int, tuple[float, int | None]] = {}
        self.run_s: dict[int, float] = {}

    def add(
        self,
        number: int,
        adapter: int | None,
        *,
        tokens: int = 4,
        tenant: str = "",
        prefix: tuple[int, ...] = (),
    ) -> None:
        loaded = None if adapter is None else LoadedAdapter(digest=digest_of(adapter))
        self.requests[number] = self.now_s, adapter
        request = GenerateRequest(
            request_id=RequestId(number),
            prompt_token_ids=(*prefix, number % 97, 1, 2),
            sampling=SamplingParams(max_tokens=tokens),
            lora=None if adapter is None else str(adapter),
            adapter=loaded,
            tenant=tenant,
        )
        self.take(self.scheduler.add(request, now_s=self.now_s))

    def step(self) -> bool:
        plan = self.scheduler.plan(now_s=self.now_s)
        if plan is not None:
            self.launch(plan)
        if self.in_flight and (plan is None or len(self.in_flight) > 1):
            done = self.in_flight.popleft()
            self.now_s += STEP_S
            self.take(self.scheduler.apply(done, sampled(done), now_s=self.now_s))
        elif plan is None:
            self.now_s += STEP_S
        return plan is not None or bool(self.in_flight)

    def launch(self, plan: StepPlan) -> None:
        for load in plan.adapter_loads:
            self.slots[load.slot] = load.digest
        for start in plan.started:
            self.rows[start.slot] = start.request
        for slot in plan.slots.tolist():
            adapter = self.rows[slot].adapter
            assert adapter is None or self.slots[adapter.slot] == adapter.digest, "a row runs with another adapter"
        self.in_flight.append(plan)

    def take(self, events: Iterable[TokenEvent]) -> None:
        for event in events:
            if isinstance(event, Scheduled):
                self.waits_s[event.request_id] = event.queued_s
            if isinstance(event, Finished | Failed):
                self.ended[event.request_id] = event
                arrived_s = self.requests[event.request_id][0]
                self.run_s[event.request_id] = self.now_s - arrived_s - self.waits_s.get(event.request_id, 0.0)

    def run(self, until: int | None = None) -> None:
        while len(self.ended) < (len(self.requests) if until is None else until):
            self.step()


def sampled(plan: StepPlan) -> StepResult:
    """A token of every row that samples."""
    counts = (plan.max_new > 0).astype(np.int32)
    return StepResult(new_counts=counts, token_ids=np.full(int(counts.sum()), 5, np.int32))


@pytest.mark.parametrize("seed", range(8))
def test_prompts_of_a_common_prefix_wait_for_their_adapter_as_others_do(
    checked_scheduler: type[TokenBudgetScheduler], seed: int
) -> None:
    """One waits for another to compute what both begin with; meanwhile their adapter's slot may be claimed."""
    rng = np.random.default_rng(seed)
    world = World(checked_scheduler, num_slots=1, max_step_tokens=16)
    prefixes = [tuple(range(10 * adapter, 10 * adapter + 80)) for adapter in range(3)]
    for number in range(40):
        adapter = int(rng.integers(3))
        world.add(number, adapter, tokens=int(rng.integers(1, 60)), prefix=prefixes[adapter])
        for _ in range(int(rng.integers(4))):
            world.step()
    world.run()
    assert all(isinstance(event, Finished) for event in world.ended.values())
    assert world.scheduler.stats().cached_tokens > 30 * 80


def test_adapters_beyond_the_slots_take_turns(checked_scheduler: type[TokenBudgetScheduler]) -> None:
    world = World(checked_scheduler, num_slots=2)
    for number in range(12):
        world.add(number, number % 6 if number % 5 else None)
    world.run()
    assert all(isinstance(event, Finished) for event in world.ended.values())
    assert set(world.slots) == {0, 1}


def test_later_ones_pass_a_request_whose_adapter_has_no_slot(checked_scheduler: type[TokenBudgetScheduler]) -> None:
    world = World(checked_scheduler, num_slots=1)
    world.add(0, 1, tokens=50)
    world.step()
    world.add(1, 2)
    world.add(2, 1)
    world.add(3, None)
    world.step()
    world.step()
    world.step()
    assert world.waits_s.keys() == {0, 2, 3}
    world.run()
    assert isinstance(world.ended[1], Finished)


def test_slot_that_is_claimed_admits_no_more_and_drains(checked_scheduler: type[TokenBudgetScheduler]) -> None:
    """A stream of requests of one adapter would keep the only slot for ever."""
    world = World(checked_scheduler, num_slots=1, max_num_seqs=4)
    world.add(0, 1, tokens=10)
    world.add(1, 2)
    number = 2
    while 1 not in world.waits_s:
        if number % 2:
            world.add(number, 1, tokens=10)
        number += 1
        world.step()
        assert world.now_s < 60
    longest_s = max(world.run_s[each] for each in world.run_s if each != 1)
    assert MAX_BYPASS_REQUESTS * STEP_S / 10 < world.waits_s[1] <= MAX_BYPASS_S + longest_s + 3 * STEP_S


def test_requests_passed_are_counted() -> None:
    """Many short ones in little time: the number is the bound, not the seconds."""
    world = World(TokenBudgetScheduler, num_slots=1, max_num_seqs=16)
    world.add(0, 1, tokens=30)
    world.add(1, 2)
    for number in range(2, 2 + 3 * MAX_BYPASS_REQUESTS):
        world.add(number, 1, tokens=1)
    world.run()
    earlier = [number for number, wait_s in world.waits_s.items() if number > 1 and wait_s < world.waits_s[1]]
    assert MAX_BYPASS_REQUESTS <= len(earlier) <= MAX_BYPASS_REQUESTS + 16


@pytest.mark.parametrize("policy", [FirstComeFirstServed, FairShare])
def test_rarest_of_32_adapters_waits_within_the_bound(
    policy: type[QueuePolicy],
) -> None:
    """Zipf's traffic over four slots: p99 of the rarest adapters' waits, and every wait of theirs."""
    rng = np.random.default_rng(8)
    world = World(TokenBudgetScheduler, num_slots=4, policy=policy(QueuePolicyConfig()), max_num_seqs=32)
    popularity = 1 / np.arange(1, 33) ** 1.2
    popularity /= popularity.sum()
    arrivals = np.cumsum(rng.exponential(1 / 8.0, 700))
    adapters = rng.choice(32, len(arrivals), p=popularity)
    lengths = rng.integers(2, 16, len(arrivals))
    number = 0
    while number < len(arrivals) or len(world.ended) < number:
        while number < len(arrivals) and arrivals[number] <= world.now_s:
            world.add(number, int(adapters[number]), tokens=int(lengths[number]), tenant=f"t{adapters[number] % 3}")
            number += 1
        world.step()
    longest_s = max(world.run_s.values())
    of_rare = [wait_s for each, wait_s in world.waits_s.items() if adapters[each] >= 24]
    assert len(of_rare) > 20
    assert max(of_rare) <= MAX_BYPASS_S + longest_s + 2 * STEP_S, (max(of_rare), longest_s)
    assert max(world.waits_s.values()) <= MAX_BYPASS_S + longest_s + 2 * STEP_S


def test_request_waits_until_its_adapter_is_in_host_memory(checked_scheduler: type[TokenBudgetScheduler]) -> None:
    world = World(checked_scheduler, num_slots=2, port=Port(delay=10**6))
    world.add(0, 1)
    world.add(1, None)
    world.run(until=1)
    assert world.waits_s.keys() == {1}
    assert world.port.asked.keys() == {digest_of(1)}
    world.port.delay = 0
    world.run()
    assert world.port.pinned == [digest_of(1)]


def test_request_of_a_tenant_goes_before_others_that_may_pass(checked_scheduler: type[TokenBudgetScheduler]) -> None:
    """The tenant whose turn it is keeps it: first its own later request, then another's."""
    world = World(checked_scheduler, num_slots=1, policy=FairShare(QueuePolicyConfig()), max_num_seqs=2)
    world.add(0, 1, tokens=60, tenant="c")
    world.step()
    world.add(1, 2, tenant="a")
    world.add(2, None, tenant="a", tokens=5)
    world.add(3, None, tenant="b", tokens=5)
    world.run(until=2)
    assert list(world.waits_s)[:2] == [0, 2]


def test_dropped_adapter_ends_what_waits_for_it_alone(checked_scheduler: type[TokenBudgetScheduler]) -> None:
    world = World(checked_scheduler, num_slots=1)
    world.add(0, 1, tokens=40)
    world.step()
    world.add(1, 2)
    world.add(2, 2)
    world.add(3, 1)
    assert world.scheduler.adapter_users() == {digest_of(1): (1, 1), digest_of(2): (0, 2)}
    world.take(world.scheduler.drop_adapter(digest_of(2), FailureKind.NOT_FOUND, "gone"))
    assert [world.ended[each] for each in (1, 2)] == [
        Failed(RequestId(each), FailureKind.NOT_FOUND, "gone") for each in (1, 2)
    ]
    assert digest_of(2) in world.port.released
    world.run()
    assert world.scheduler.adapter_users() == {}


def test_aborts_leave_no_claims_and_no_users(checked_scheduler: type[TokenBudgetScheduler]) -> None:
    rng = np.random.default_rng(9)
    world = World(checked_scheduler, num_slots=2, max_num_seqs=4, port=Port(delay=2))
    for number in range(60):
        world.add(number, int(rng.integers(0, 6)) if rng.random() < 0.8 else None, tokens=int(rng.integers(1, 9)))
        world.step()
        if rng.random() < 0.3:
            world.take(world.scheduler.abort(RequestId(int(rng.integers(0, number + 1)))))
    world.run()
    assert world.scheduler.adapter_users() == {}
    held: Mapping[int, bytes] = world.slots
    assert set(held) <= {0, 1}
