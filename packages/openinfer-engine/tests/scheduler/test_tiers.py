"""The scheduler with KV tiers: any order of requests, loads, saves, aborts and faults, in a pool of a few blocks.

The fake device catches every row that reads KV of another prefix, so a load that is read too early, a block that is
given away under a copy, and a save of a block that changes meanwhile are all found.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import msgspec
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

from openinfer_core import GenerateRequest, Refused, RequestId, SamplingParams
from openinfer_core.errors import ContractViolation
from openinfer_core.events import Finished, FinishReason
from openinfer_core.queue_policies import FirstComeFirstServed
from openinfer_core.scheduling import FlushesCache, QueuePolicyConfig, SchedulerConfig
from openinfer_core.testing.fake_device import FakeDevice
from openinfer_core.testing.fake_model import NUM_TOKEN_IDS
from openinfer_core.testing.scheduler_driver import RunsAt, SchedulerDriver
from openinfer_engine.kv_tiers import PoolTierPort
from openinfer_engine.scheduler import TokenBudgetScheduler
from openinfer_kv_cache import Digest, KvLayout, KvTier, TierCounters, TieredScheduler, TierFailure, TransferState

Content = tuple[int | None, ...]
GARBAGE = -1
HALF_BITS = 32
HALF = 2**HALF_BITS - 1
NEVER = 10**9
STATES: dict[str, Any] = {"prefix_cache": False, "num_snapshots": 3}
"""Of a model with recurrent states."""


@dataclass
class FakeBlock:
    device: FakeDevice
    block_id: int

    def read(self) -> Content:
        return self.device.read_block(self.block_id)

    def write(self, content: Content) -> None:
        self.device.write_block(self.block_id, content)


@dataclass
class FakeChunk:
    """Half of the states of a slot: 32 bits of them."""

    device: FakeDevice
    slot: int
    half: int

    def read(self) -> Content:
        state = self.device.states.read(self.slot)
        return (None if state is None else state >> self.half * HALF_BITS & HALF,)

    def write(self, content: Content) -> None:
        (given,) = content
        state = self.device.states.read(self.slot) or 0
        kept = state & HALF << (1 - self.half) * HALF_BITS
        self.device.states.write(self.slot, None if given is None else kept | (given & HALF) << self.half * HALF_BITS)


@dataclass
class FakeHit:
    digests: tuple[Digest, ...]

    def close(self) -> None:
        pass


@dataclass(eq=False)
class FakeTransfer:
    """Ends after so many polls; until then it may write anything into a load's blocks."""

    tier: "FakeTier"
    digests: tuple[Digest, ...]
    blocks: list[FakeBlock | FakeChunk]
    is_load: bool
    polls_left: int
    completed_blocks: int = 0
    failure: TierFailure | None = None
    state: TransferState = TransferState.PENDING
    is_cancelled: bool = False
    before: list[Content] = field(default_factory=list[Content])
    held: list[Content] = field(default_factory=list[Content])
    """Of a load: what the tier keeps for it, whatever it gives up meanwhile."""

    def __post_init__(self) -> None:
        if self.is_load:
            self.held = [self.tier.contents[digest] for digest in self.digests]
            for content, block in zip(self.held, self.blocks, strict=True):
                block.write((GARBAGE,) * len(content))
        else:
            self.before = [block.read() for block in self.blocks]

    @property
    def num_blocks(self) -> int:
        return len(self.digests)

    def poll(self) -> TransferState:
        if self.state is TransferState.PENDING:
            self.polls_left -= 1
            if self.polls_left <= 0:
                self._end()
        return self.state

    def cancel(self) -> None:
        self.is_cancelled = True

    def wait(self, timeout_s: float | None = None) -> TransferState:
        return self.poll()

    def _end(self) -> None:
        tier = self.tier
        landing = tier.random.randint(0, self.num_blocks) if tier.random.random() < tier.fault_rate else self.num_blocks
        for place, (digest, block) in enumerate(list(zip(self.digests, self.blocks, strict=True))[:landing]):
            if self.is_load:
                block.write(self.held[place])
            else:
                tier.contents[digest] = block.read()
        if not self.is_load:
            now = [block.read() for block in self.blocks]
            assert now == self.before, "a block was overwritten while it was saved"
        self.completed_blocks = landing
        if landing == self.num_blocks:
            self.state = TransferState.COMPLETED
        elif self.is_cancelled:
            self.state = TransferState.CANCELLED
        else:
            self.state, self.failure = TransferState.PARTIAL, TierFailure.IO_ERROR


class FakeTier:
    """Keeps what the fake device's blocks hold."""

    name = "fake"
    layout: KvLayout
    accepts_saves = True

    def __init__(self, *, block_tokens: int, seed: int = 0, slowness: int = 1, fault_rate: float = 0.0) -> None:
        """`slowness`: polls until a transfer ends, at most."""
        self.block_tokens = block_tokens
        self.random = random.Random(seed)
        self.load_polls = self.save_polls = slowness
        self.fault_rate = fault_rate
        self.contents: dict[Digest, Content] = {}
        self.loads: list[FakeTransfer] = []
        self.saves: list[FakeTransfer] = []
        self.finds = 0
        self.is_closed = False

    @property
    def pending(self) -> list[FakeTransfer]:
        """Transfers that have not ended."""
        return [each for each in (*self.loads, *self.saves) if each.state is TransferState.PENDING]

    def find(self, digests: Sequence[Digest]) -> FakeHit:
        self.finds += 1
        found = 0
        while found < len(digests) and digests[found] in self.contents:
            found += 1
        return FakeHit(tuple(digests[:found]))

    def load(
        self, hit: FakeHit, blocks: list[FakeBlock | FakeChunk], *, timeout_s: float | None = None
    ) -> FakeTransfer:
        transfer = FakeTransfer(self, hit.digests, blocks, True, self._draw(self.load_polls))
        self.loads.append(transfer)
        return transfer

    def save(
        self, digests: Sequence[Digest], blocks: list[FakeBlock | FakeChunk], *, timeout_s: float | None = None
    ) -> FakeTransfer:
        transfer = FakeTransfer(self, tuple(digests), blocks, False, self._draw(self.save_polls))
        self.saves.append(transfer)
        return transfer

    def _draw(self, most: int) -> int:
        return NEVER if most == NEVER else self.random.randint(1, most)

    def counters(self) -> tuple[TierCounters, ...]:
        return ()

    def close(self) -> None:
        self.is_closed = True


@dataclass(eq=False)
class FakeShareMove:
    """Of another rank: ends after so many polls, with as many blocks as it was told."""

    num_blocks: int
    landing: int
    polls_left: int
    begin_s: float = 0.0
    completed_blocks: int = 0

    def is_over(self) -> bool:
        self.polls_left -= 1
        if self.polls_left <= 0:
            self.completed_blocks = self.landing
        return self.polls_left <= 0

    def cancel(self) -> None:
        self.landing = 0

    def wait(self, timeout_s: float) -> None:
        assert timeout_s > 0


class FakeShare:
    """Another rank, whose tiers lack some of what rank 0's have."""

    faults = 0

    def __init__(self, seed: int, *, slowness: int = 1, fault_rate: float = 0.0, most_blocks: int = NEVER) -> None:
        self.random = random.Random(seed)
        self.slowness = slowness
        self.most_blocks = most_blocks
        self.fault_rate = fault_rate
        self.loads: list[FakeShareMove] = []

    def load(self, digests: Sequence[Digest], places: Sequence[int]) -> FakeShareMove:
        assert len(digests) <= len(places)
        self.loads.append(self._begin(len(digests)))
        return self.loads[-1]

    def save(self, digests: Sequence[Digest], places: Sequence[int]) -> FakeShareMove:
        assert len(digests) == len(places)
        return self._begin(len(digests))

    def stats(self) -> tuple[()]:
        return ()

    def close(self) -> None: ...

    def _begin(self, num_blocks: int) -> FakeShareMove:
        is_short = self.random.random() < self.fault_rate
        landing = min(self.most_blocks, self.random.randrange(num_blocks) if is_short else num_blocks)
        return FakeShareMove(num_blocks, landing, self.random.randint(1, self.slowness))


class Rig:
    """A driver whose scheduler uses a tier."""

    def __init__(
        self,
        factory: type[TokenBudgetScheduler],
        tier: FakeTier,
        *,
        overlap: int = 2,
        has_states: bool = True,
        runs_at: RunsAt = RunsAt.PLAN,
        shares: Sequence[FakeShare] = (),
        **limits: Any,
    ) -> None:
        chosen: dict[str, Any] = {
            "num_blocks": 8,
            "block_size_tokens": tier.block_tokens,
            "max_num_seqs": 4,
            "max_step_tokens": 12,
            "max_model_tokens": 32,
            **limits,
        }
        config = SchedulerConfig(**chosen)
        self.driver = SchedulerDriver(
            factory,
            config,
            policy=FirstComeFirstServed(QueuePolicyConfig()),
            max_in_flight=overlap,
            is_moving=self._is_moving,
            runs_at=runs_at,
        )
        device = self.driver.device
        blocks = [FakeBlock(device, block_id) for block_id in range(config.num_blocks)]
        num_slots = config.max_num_seqs + config.num_snapshots if config.num_snapshots and has_states else 0
        states = [[FakeChunk(device, slot, half) for half in range(2)] for slot in range(num_slots)]
        self.port = PoolTierPort(
            cast("KvTier", tier),
            cast("Any", blocks),
            states=cast("Any", states),
            shares=shares,
            load_timeout_s=1.0,
        )
        assert isinstance(self.driver.scheduler, TieredScheduler)
        self.driver.scheduler.use_tiers(self.port)

    def _is_moving(self) -> bool:
        """As the loop knows it: when it looked before the plan."""
        was_moving = self.port.is_moving
        self.port.settle()
        return was_moving

    def run(self, request: GenerateRequest) -> int:
        """Serves one request alone and returns its cached tokens."""
        self.driver.submit(request)
        self.driver.run()
        terminal = self.driver.accounts[request.request_id].terminal
        assert isinstance(terminal, Finished)
        return terminal.cached_tokens


def request_of(request_id: int, prompt: Sequence[int], max_tokens: int = 3, **fields: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id=RequestId(request_id),
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(max_tokens=max_tokens, **fields),
    )


@pytest.mark.parametrize("slowness", [1, 5])
def test_evicted_prefix_comes_back_from_the_tier(checked_scheduler: type[TokenBudgetScheduler], slowness: int) -> None:
    rig = Rig(checked_scheduler, FakeTier(block_tokens=4, slowness=slowness))
    assert rig.run(request_of(0, range(1, 14))) == 0
    rig.run(request_of(1, [20] * 28))  # takes the whole pool
    assert rig.run(request_of(2, range(1, 14))) == 12
    stats = rig.driver.scheduler.stats()
    assert stats.tier_tokens == 12
    assert stats.loading == 0


def test_retained_turn_that_is_given_up_all_the_same_is_in_the_tier(
    checked_scheduler: type[TokenBudgetScheduler],
) -> None:
    rig = Rig(checked_scheduler, FakeTier(block_tokens=4))
    retained = msgspec.structs.replace(request_of(0, range(1, 14)), retain_s=60.0, cache_key="k")
    rig.run(retained)
    rig.run(request_of(1, [20] * 28))  # takes the whole pool
    assert rig.driver.scheduler.stats().retained_blocks == 0
    assert rig.run(msgspec.structs.replace(retained, request_id=RequestId(2))) == 12
    assert rig.driver.scheduler.stats().tier_tokens == 12


def test_what_did_not_land_is_computed(checked_scheduler: type[TokenBudgetScheduler]) -> None:
    tier = FakeTier(block_tokens=4)
    rig = Rig(checked_scheduler, tier)
    rig.run(request_of(0, range(1, 14)))
    rig.run(request_of(1, [20] * 28))
    tier.fault_rate = 1.0
    cached = rig.run(request_of(2, range(1, 14)))
    assert cached == 4 * tier.loads[-1].completed_blocks < 12


@pytest.mark.parametrize(("num_snapshots", "cached_tokens"), [(0, 8), (1, 0)])
def test_what_another_rank_has_not_landed_is_computed(
    checked_scheduler: type[TokenBudgetScheduler], num_snapshots: int, cached_tokens: int
) -> None:
    """With recurrent states nothing of the prefix is of use then."""
    share = FakeShare(0, most_blocks=2)
    limits = {"prefix_cache": not num_snapshots, "num_snapshots": num_snapshots}
    rig = Rig(checked_scheduler, FakeTier(block_tokens=4, slowness=3), shares=[share], **limits)
    for request_id, prompt in enumerate((range(1, 14), [20] * 28, range(1, 14))):
        cached = rig.run(request_of(request_id, prompt))
    assert cached == cached_tokens
    assert share.loads


def test_others_are_planned_while_a_prefix_loads(checked_scheduler: type[TokenBudgetScheduler]) -> None:
    tier = FakeTier(block_tokens=4)
    rig = Rig(checked_scheduler, tier, num_blocks=16)
    rig.run(request_of(0, range(1, 14)))
    rig.run(request_of(1, [20] * 30))
    rig.run(request_of(2, [21] * 30))
    tier.load_polls = NEVER
    rig.driver.submit(request_of(3, range(1, 14)))
    rig.driver.submit(request_of(4, [7, 8, 9]))
    for _ in range(8):
        rig.driver.step()
    assert rig.driver.scheduler.stats().loading == 1
    assert rig.driver.accounts[RequestId(4)].terminal is not None
    assert rig.driver.accounts[RequestId(3)].scheduled is None
    tier.loads[-1].polls_left = 1
    rig.driver.run()
    assert rig.driver.accounts[RequestId(3)].scheduled is not None


def conversations_rig(factory: type[TokenBudgetScheduler]) -> tuple[FakeTier, Rig]:
    """One conversation is kept, in 66 of 166 blocks; two others are in the tier alone."""
    tier = FakeTier(block_tokens=16)
    rig = Rig(factory, tier, num_blocks=166, max_step_tokens=1024, max_model_tokens=1700)
    for request_id, (first, num_tokens) in enumerate(((2000, 1041), (2000, 1057), (4000, 1057), (6000, 1057))):
        rig.run(request_of(request_id, range(first, first + num_tokens)))
    rig.run(request_of(4, range(9000, 9000 + 1560)))
    return tier, rig


def test_while_one_loads_another_load_does_not_push_out_what_a_conversation_keeps(
    checked_scheduler: type[TokenBudgetScheduler],
) -> None:
    tier, rig = conversations_rig(checked_scheduler)
    tier.load_polls = NEVER
    for request_id, first in ((10, 4000), (11, 6000)):
        rig.driver.submit(request_of(request_id, range(first, first + 1057)))
    for _ in range(4):
        rig.driver.step()
    assert rig.driver.scheduler.stats().loading == 1  # the other one waits for it
    rig.driver.submit(request_of(12, range(2000, 3057)))
    for _ in range(12):
        rig.driver.step()
    kept = rig.driver.accounts[RequestId(12)].terminal
    assert isinstance(kept, Finished)
    assert kept.cached_tokens == 1056
    assert rig.driver.scheduler.stats().loading == 1
    tier.load_polls = 1
    for load in tier.loads:
        load.polls_left = 1
    rig.driver.run()
    assert rig.driver.accounts[RequestId(11)].terminal is not None


def test_a_short_prompt_waits_for_no_load(checked_scheduler: type[TokenBudgetScheduler]) -> None:
    tier, rig = conversations_rig(checked_scheduler)
    tier.load_polls = NEVER
    rig.driver.submit(request_of(10, range(4000, 5057)))
    for request_id, prompt in ((11, range(12000, 12500)), (12, range(13000, 13300))):
        rig.driver.submit(request_of(request_id, prompt, max_tokens=9))
    for _ in range(20):
        rig.driver.step()
    assert all(rig.driver.accounts[RequestId(each)].terminal is not None for each in (11, 12))
    for load in tier.loads:
        load.polls_left = 1
    rig.driver.run()


def test_blocks_of_an_aborted_load_stay_until_no_copy_touches_them(
    checked_scheduler: type[TokenBudgetScheduler],
) -> None:
    tier = FakeTier(block_tokens=4)
    rig = Rig(checked_scheduler, tier)
    rig.run(request_of(0, range(1, 14)))
    rig.run(request_of(1, [20] * 28))
    tier.load_polls = NEVER
    rig.driver.submit(request_of(2, range(1, 14)))
    rig.driver.step()
    rig.driver.abort(RequestId(2))
    terminal = rig.driver.accounts[RequestId(2)].terminal
    assert isinstance(terminal, Finished)
    assert terminal.reason is FinishReason.ABORT
    rig.driver.step()
    assert rig.driver.scheduler.stats().blocks_used > 0
    assert tier.loads[-1].is_cancelled
    tier.loads[-1].polls_left = 1
    rig.driver.run()
    assert rig.driver.scheduler.stats().blocks_used == 0


def test_load_gives_way_before_anybody_is_preempted(checked_scheduler: type[TokenBudgetScheduler]) -> None:
    tier = FakeTier(block_tokens=4)
    rig = Rig(checked_scheduler, tier)
    rig.run(request_of(0, range(1, 14)))
    rig.run(request_of(1, [20] * 28))
    tier.load_polls = NEVER
    rig.driver.submit(request_of(2, [5, 6], max_tokens=25))
    rig.driver.step()
    rig.driver.submit(request_of(3, range(1, 14)))
    for _ in range(18):
        rig.driver.step()
    assert tier.loads[-1].is_cancelled
    tier.loads[-1].polls_left = 1
    rig.driver.run()
    assert rig.driver.scheduler.stats().preemptions == 0


def test_tier_that_raises_is_left_alone_and_counted(checked_scheduler: type[TokenBudgetScheduler]) -> None:
    class Raising(FakeTier):
        def find(self, digests: Sequence[Digest]) -> FakeHit:
            raise RuntimeError("injected")

    tier = Raising(block_tokens=4)
    rig = Rig(checked_scheduler, tier)
    for request_id in range(3):
        rig.run(request_of(request_id, range(1, 14)))
        rig.run(request_of(10 + request_id, [20] * 28))
    assert rig.port.faults == 1


def test_tier_that_raises_when_it_is_closed_keeps_nobody_from_closing_the_rest(
    checked_scheduler: type[TokenBudgetScheduler],
) -> None:
    class Raising(FakeTier):
        def close(self) -> None:
            raise RuntimeError("injected")

    rig = Rig(checked_scheduler, Raising(block_tokens=4))
    rig.port.close()
    assert rig.port.faults == 1


PROMPT, WHOLE_POOL = tuple(range(1, 14)), (20,) * 28


def states_rig(factory: type[TokenBudgetScheduler], tier: FakeTier, **limits: Any) -> Rig:
    """Of a model with recurrent states, which has served `PROMPT`."""
    rig = Rig(factory, tier, **{**STATES, **limits})
    assert rig.run(request_of(0, PROMPT)) == 0
    return rig


@pytest.mark.parametrize("slowness", [1, 5])
def test_kv_and_states_that_were_evicted_come_back_together(
    checked_scheduler: type[TokenBudgetScheduler], slowness: int
) -> None:
    rig = states_rig(checked_scheduler, FakeTier(block_tokens=4, slowness=slowness), num_snapshots=1)
    rig.run(request_of(1, WHOLE_POOL))
    assert rig.run(request_of(2, PROMPT)) == 12
    assert rig.driver.scheduler.stats().tier_tokens == 12


def test_states_alone_come_back_where_the_pool_has_the_kv(checked_scheduler: type[TokenBudgetScheduler]) -> None:
    tier = FakeTier(block_tokens=4)
    rig = states_rig(checked_scheduler, tier, num_blocks=32, num_snapshots=1)
    rig.run(request_of(1, WHOLE_POOL))
    assert rig.run(request_of(2, PROMPT)) == 12
    assert [transfer.num_blocks for transfer in tier.loads] == [2]
    assert rig.driver.scheduler.stats().tier_tokens == 12


def test_kv_alone_comes_back_where_the_states_are_kept(checked_scheduler: type[TokenBudgetScheduler]) -> None:
    tier = FakeTier(block_tokens=4)
    rig = states_rig(checked_scheduler, tier)
    rig.run(request_of(1, WHOLE_POOL))
    assert rig.run(request_of(2, PROMPT)) == 12
    assert [transfer.num_blocks for transfer in tier.loads] == [3]


def test_prefix_without_states_in_the_tier_is_computed(checked_scheduler: type[TokenBudgetScheduler]) -> None:
    tier = FakeTier(block_tokens=4)
    rig = states_rig(checked_scheduler, tier, num_snapshots=1)
    rig.run(request_of(1, WHOLE_POOL))
    states = [digest for digest, content in tier.contents.items() if len(content) == 1]
    del tier.contents[states[1]]
    assert rig.run(request_of(2, PROMPT)) == 0
    assert not tier.loads


def test_load_goes_to_the_deepest_boundary_with_states(checked_scheduler: type[TokenBudgetScheduler]) -> None:
    """The prompt that goes on from the first one's answer finds blocks beyond the states of the first prompt."""
    tier = FakeTier(block_tokens=4)
    rig = Rig(checked_scheduler, tier, **STATES)
    rig.driver.submit(request_of(0, PROMPT, max_tokens=8))
    rig.driver.run()
    said = tuple(rig.driver.accounts[RequestId(0)].token_ids)
    rig.run(request_of(1, WHOLE_POOL))
    for prompt in ((22,) * 28, (23,) * 28):
        rig.run(request_of(prompt[0], prompt))
    assert rig.run(request_of(2, (*PROMPT, *said, 30))) == 12
    assert [transfer.num_blocks for transfer in tier.loads] == [2, 3]
    assert rig.driver.scheduler.stats().tier_tokens == 12


def test_where_states_or_kv_fall_short_the_prefix_is_computed(checked_scheduler: type[TokenBudgetScheduler]) -> None:
    tier = FakeTier(block_tokens=4)
    rig = states_rig(checked_scheduler, tier, num_snapshots=1)
    rig.run(request_of(1, WHOLE_POOL))
    tier.fault_rate = 1.0
    assert rig.run(request_of(2, PROMPT)) == 0
    assert tier.loads
    assert rig.driver.scheduler.stats().tier_tokens == 0


def test_second_with_the_same_prefix_waits_for_the_first_ones_load(
    checked_scheduler: type[TokenBudgetScheduler],
) -> None:
    tier = FakeTier(block_tokens=4)
    rig = states_rig(checked_scheduler, tier, num_blocks=16, num_snapshots=1)
    rig.run(request_of(1, WHOLE_POOL))
    rig.run(request_of(2, [21] * 28))
    tier.load_polls = NEVER
    for request_id in (3, 4):
        rig.driver.submit(request_of(request_id, PROMPT))
    for _ in range(3):
        rig.driver.step()
    stats = rig.driver.scheduler.stats()
    assert (stats.loading, stats.waiting, stats.running) == (1, 2, 0)
    for transfer in tier.pending:
        transfer.polls_left = 1
    rig.driver.run()
    scheduled = [rig.driver.accounts[RequestId(each)].scheduled for each in (3, 4)]
    assert [each and each.cached_tokens for each in scheduled] == [12, 12]
    assert rig.driver.scheduler.stats().tier_tokens == 12


def test_snapshot_that_is_saved_is_not_evicted_and_what_is_beyond_a_share_is_not_saved(
    checked_scheduler: type[TokenBudgetScheduler],
) -> None:
    tier = FakeTier(block_tokens=4)
    tier.save_polls = NEVER
    rig = Rig(checked_scheduler, tier, **STATES | {"num_snapshots": 2}, num_blocks=32)
    for request_id in range(3):
        rig.driver.submit(request_of(request_id, range(request_id * 20, request_id * 20 + 9)))
        for _ in range(8):
            rig.driver.step()
    stats = rig.driver.scheduler.stats()
    assert stats.state_snapshots == 2
    assert stats.unsaved_blocks == 4
    for transfer in tier.pending:
        transfer.polls_left = 1
    rig.driver.run()
    assert rig.run(request_of(3, range(9))) == 8


def test_slow_saves_of_states_give_way_to_snapshots_that_find_no_room(
    checked_scheduler: type[TokenBudgetScheduler],
) -> None:
    tier, now_s = FakeTier(block_tokens=4), [0.0]
    tier.save_polls = NEVER
    rig = Rig(checked_scheduler, tier, **STATES | {"num_snapshots": 1}, num_blocks=32)
    rig.port.clock = lambda: now_s[0]
    rig.driver.submit(request_of(0, range(9)))
    for _ in range(6):
        rig.driver.step()
    states = [transfer for transfer in tier.saves if isinstance(transfer.blocks[0], FakeChunk)]
    assert states
    assert not any(transfer.is_cancelled for transfer in states)
    now_s[0] = 1.0
    rig.driver.submit(request_of(1, range(20, 29)))
    for _ in range(6):
        rig.driver.step()
    assert all(transfer.is_cancelled for transfer in states)
    for transfer in tier.pending:
        transfer.polls_left = 1
    rig.driver.run()


def test_cache_is_flushed_once_saves_of_states_have_ended_though_no_step_was_planned_since(
    checked_scheduler: type[TokenBudgetScheduler],
) -> None:
    """As while an engine is paused, whose loop looks after copies and plans nothing."""
    tier = FakeTier(block_tokens=4)
    tier.save_polls = NEVER
    rig = Rig(checked_scheduler, tier, **STATES, num_blocks=32)
    rig.driver.submit(request_of(0, range(9), max_tokens=1))
    while rig.driver.accounts[RequestId(0)].terminal is None:
        rig.driver.step()
    scheduler = rig.driver.scheduler
    assert isinstance(scheduler, FlushesCache)
    with pytest.raises(Refused, match="copies have not completed"):
        scheduler.flush_cache()
    for transfer in tier.pending:
        transfer.polls_left = 1
    rig.port.settle()
    scheduler.flush_cache()
    assert (scheduler.stats().blocks_used, scheduler.stats().state_snapshots) == (0, 0)


def test_only_a_share_of_the_pool_is_saved_at_a_time(checked_scheduler: type[TokenBudgetScheduler]) -> None:
    tier = FakeTier(block_tokens=1)
    tier.save_polls = NEVER
    rig = Rig(checked_scheduler, tier, num_blocks=64)
    for request_id in range(3):
        rig.driver.submit(request_of(request_id, range(request_id * 20, request_id * 20 + 18), max_tokens=1))
    for _ in range(12):
        rig.driver.step()
    assert rig.driver.scheduler.stats().unsaved_blocks > 0
    assert rig.driver.scheduler.stats().blocks_used <= 32


def test_tiers_are_refused_without_a_prefix_cache(checked_scheduler: type[TokenBudgetScheduler]) -> None:
    with pytest.raises(ContractViolation, match="KV tiers need a prefix cache"):
        Rig(checked_scheduler, FakeTier(block_tokens=4), prefix_cache=False)


def test_tiers_of_a_model_with_states_are_refused_without_their_memory(
    checked_scheduler: type[TokenBudgetScheduler],
) -> None:
    with pytest.raises(ContractViolation, match="need the states' memory"):
        Rig(checked_scheduler, FakeTier(block_tokens=4), has_states=False, **STATES)


@pytest.mark.parametrize("num_snapshots", [0, 1, 3])
@pytest.mark.parametrize("seed", range(30))
def test_random_traffic_with_a_slow_and_faulty_tier_keeps_books_and_tokens_right(
    checked_scheduler: type[TokenBudgetScheduler], seed: int, num_snapshots: int
) -> None:
    draw = random.Random(seed)
    block_tokens = draw.choice((1, 2, 4))
    tier = FakeTier(
        block_tokens=block_tokens, seed=seed, slowness=draw.choice((1, 4, 30)), fault_rate=draw.choice((0.0, 0.3))
    )
    rig = Rig(
        checked_scheduler,
        tier,
        overlap=draw.choice((1, 2)),
        runs_at=draw.choice(tuple(RunsAt)),
        shares=[FakeShare(seed, slowness=draw.choice((1, 6)), fault_rate=0.1)] * draw.choice((0, 0, 1)),
        num_blocks=20 // block_tokens + draw.randint(0, 3),
        max_num_seqs=draw.randint(2, 5),
        max_model_tokens=20,
        max_step_tokens=5 + draw.randint(0, 8),
        max_waiting=64,
        prefix_cache=not num_snapshots,
        num_snapshots=num_snapshots,
    )
    prefixes = [tuple(draw.randrange(NUM_TOKEN_IDS) for _ in range(8)) for _ in range(3)]
    for request_id in range(60):
        own = tuple(draw.randrange(NUM_TOKEN_IDS) for _ in range(draw.randint(1, 6)))
        rig.driver.submit(
            request_of(
                request_id,
                (*draw.choice(prefixes), *own),
                max_tokens=draw.choice((1, 3, 12)),
                prompt_logprobs=draw.choice((None, None, None, 0)),
            )
        )
        for _ in range(draw.randint(0, 4)):
            rig.driver.step()
        if draw.random() < 0.1:
            rig.driver.abort(RequestId(draw.randint(0, request_id)))
    rig.driver.run()
    rig.port.close()
    assert tier.is_closed
    assert tier.finds
    assert tier.contents


PREFIXES = ((), (1, 2, 3, 4), (1, 2, 3, 4, 5, 6, 7, 8))


class TiersMachine(RuleBasedStateMachine):
    """Transfers end when a rule says so, whole or short; tenants send the same tokens under different salts."""

    rig: Rig
    tier: FakeTier
    totals: ClassVar[Counter[str]]

    def __init__(self) -> None:
        super().__init__()
        self.num_requests = 0

    @initialize(
        block_tokens=st.sampled_from((1, 2, 4)),
        extra_blocks=st.integers(0, 3),
        overlap=st.sampled_from((1, 2)),
        runs_at=st.sampled_from(RunsAt),
        num_snapshots=st.sampled_from((0, 0, 1, 3)),
    )
    def make(self, *, block_tokens: int, extra_blocks: int, overlap: int, runs_at: RunsAt, num_snapshots: int) -> None:
        """With snapshots, of a model with recurrent states."""
        self.tier = FakeTier(block_tokens=block_tokens)
        self.rig = Rig(
            TokenBudgetScheduler,
            self.tier,
            overlap=overlap,
            runs_at=runs_at,
            num_blocks=20 // block_tokens + extra_blocks,
            max_model_tokens=20,
            max_waiting=8,
            prefix_cache=not num_snapshots,
            num_snapshots=num_snapshots,
        )
        for cache_salt in (None, "a"):
            self.submit(prefix=PREFIXES[-1], own=[0], max_tokens=1, cache_salt=cache_salt)
            self.rig.driver.run()
        for token_id in (20, 21):  # takes the pool, so that nothing of the prefixes stays in it
            self.submit(prefix=(), own=[token_id] * 18, max_tokens=2, cache_salt=None)
            self.rig.driver.run()
        self.tier.load_polls = self.tier.save_polls = NEVER

    @rule(
        prefix=st.sampled_from(PREFIXES),
        own=st.lists(st.integers(0, NUM_TOKEN_IDS - 1), min_size=1, max_size=6),
        max_tokens=st.sampled_from((1, 3, 12)),
        cache_salt=st.sampled_from((None, None, "a")),
    )
    def submit(self, *, prefix: tuple[int, ...], own: list[int], max_tokens: int, cache_salt: str | None) -> None:
        request = request_of(self.num_requests, (*prefix, *own), max_tokens)
        self.rig.driver.submit(msgspec.structs.replace(request, cache_salt=cache_salt))
        self.num_requests += 1

    @rule(first=st.integers(0, NUM_TOKEN_IDS - 1), steps=st.integers(2, 12))
    def submit_some_who_do_not_fit_together(self, *, first: int, steps: int) -> None:
        """Prefixes that load next to outputs that grow until the pool is short."""
        for place, cache_salt in enumerate((None, "a", None)):
            prefix = () if place == 0 else PREFIXES[-1]
            self.submit(prefix=prefix, own=[first, place], max_tokens=18, cache_salt=cache_salt)
        self.step(steps=steps)

    @rule(steps=st.integers(1, 8))
    def step(self, *, steps: int) -> None:
        for _ in range(steps):
            self.rig.driver.step()
            self.rig.driver.scheduler.check_integrity()

    @precondition(lambda self: self.num_requests)
    @rule(data=st.data())
    def abort(self, *, data: st.DataObject) -> None:
        self.rig.driver.abort(RequestId(data.draw(st.integers(max(0, self.num_requests - 8), self.num_requests - 1))))

    @precondition(lambda self: self.num_requests)
    @rule(data=st.data())
    def fail_a_row(self, *, data: st.DataObject) -> None:
        request_id = data.draw(st.integers(max(0, self.num_requests - 8), self.num_requests - 1))
        self.rig.driver.device.fail_next_row(RequestId(request_id))

    @precondition(lambda self: self.tier.pending)
    @rule(data=st.data(), falls_short=st.booleans())
    def end_a_transfer(self, *, data: st.DataObject, falls_short: bool) -> None:
        """Whichever the draw picks ends at the next poll."""
        transfer = data.draw(st.sampled_from(self.tier.pending))
        self.tier.fault_rate = float(falls_short)
        transfer.polls_left = 1

    @precondition(lambda self: self.tier.contents)
    @rule(data=st.data())
    def evict_from_the_tier(self, *, data: st.DataObject) -> None:
        del self.tier.contents[data.draw(st.sampled_from(list(self.tier.contents)))]

    @invariant()
    def books_agree(self) -> None:
        self.rig.driver.scheduler.check_integrity()

    def teardown(self) -> None:
        for transfer in self.tier.pending:
            transfer.polls_left = 1
        self.tier.load_polls = self.tier.save_polls = 1
        self.rig.driver.run()
        stats = self.rig.driver.scheduler.stats()
        kind = "states " if self.rig.driver.config.num_snapshots else ""
        cancelled = sum(transfer.is_cancelled for transfer in self.tier.loads)
        self.totals[f"{kind}loads"] += len(self.tier.loads)
        self.totals[f"{kind}loaded"] += stats.tier_tokens
        self.totals[f"{kind}preemptions"] += stats.preemptions
        self.totals[f"{kind}cancelled"] += cancelled
        self.rig.driver.scheduler.check_integrity()
        self.rig.port.close()


def test_any_order_of_events_loads_and_saves_keeps_the_books_and_the_tokens_right() -> None:
    class Machine(TiersMachine):
        totals: ClassVar[Counter[str]] = Counter()

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=100,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
    seen = [f"{kind}{each}" for kind in ("", "states ") for each in ("loads", "loaded", "preemptions", "cancelled")]
    assert min(Machine.totals[each] for each in seen) > 0, Machine.totals
