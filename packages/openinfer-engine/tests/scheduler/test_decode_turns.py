"""Decode rows of one tenant next to another's, by what steps took; seconds are the test's."""

import contextlib
from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import pytest

from openinfer_core import GenerateRequest, RequestId, SamplingParams
from openinfer_core.queue_policies import FairShare
from openinfer_core.scheduling import QueuePolicyConfig, SchedulerConfig
from openinfer_core.testing.fake_device import FakeDevice
from openinfer_engine.scheduler import TokenBudgetScheduler
from openinfer_engine.scheduler.company import ALONE_MS, ALONE_TOKENS, COMPANY_S
from openinfer_engine.scheduler.decode_turns import LEAST_ROWS, RECENT_STEPS, ROWS_MS, TURN_STEPS, DecodeTurns
from openinfer_engine.scheduler.itl_limit import LEAST_TOKENS, OTHERS_MS
from openinfer_engine.scheduler.row_shares import RowShares
from openinfer_engine.scheduler.run_queue import RunQueue
from openinfer_engine.scheduler.sequence import Sequence

BASE_MS = 3.0
MAX_TOKENS = 3000


class Timed:
    """A scheduler whose steps take a time that follows from their rows."""

    def __init__(
        self,
        *,
        row_ms: float,
        token_ms: float = 0.0,
        read_ms: float = 0.0,
        num_slots: int = 256,
        num_blocks: int = 2**18,
        **limits: Any,
    ) -> None:
        sizes = {"max_step_tokens": 4096, "max_model_tokens": 4096, "block_size_tokens": 4, **limits}
        config = SchedulerConfig(num_blocks=num_blocks, max_num_seqs=num_slots, **sizes)
        self.scheduler = TokenBudgetScheduler(config, FairShare(QueuePolicyConfig()))
        self._device = FakeDevice(config)
        self._row_ms, self._token_ms, self._read_ms = row_ms, token_ms, read_ms
        self._now_s = 0.0
        self._num_requests = 0
        self.tenants: dict[RequestId, str] = {}

    def add(self, tenant: str, num: int, *, prompt_tokens: int = 3, **sampling: Any) -> None:
        for _ in range(num):
            request_id = RequestId(self._num_requests)
            self._num_requests += 1
            self.tenants[request_id] = tenant
            params = SamplingParams(**{"max_tokens": MAX_TOKENS, **sampling})
            prompt = (1 + request_id % 200,) * prompt_tokens
            request = GenerateRequest(request_id=request_id, prompt_token_ids=prompt, sampling=params, tenant=tenant)
            self.scheduler.add(request, now_s=self._now_s)

    def step(self) -> tuple[float, Counter[RequestId]]:
        """Its milliseconds, and the tokens of each request."""
        plan = self.scheduler.plan(now_s=self._now_s)
        assert plan is not None
        took_ms = BASE_MS + self._row_ms * plan.num_rows + self._token_ms * int(plan.num_host_tokens.sum())
        took_ms += self._read_ms * int(plan.starts.sum())
        self._now_s += took_ms * 1e-3
        events = self.scheduler.apply(plan, self._device.run(plan), now_s=self._now_s)
        return took_ms, Counter(event.request_id for event in events)

    def wait(self, seconds: float) -> None:
        self._now_s += seconds

    def steps(self, num: int) -> tuple[list[float], Counter[RequestId]]:
        taken = [self.step() for _ in range(num)]
        return [ms for ms, _ in taken], sum((tokens for _, tokens in taken), Counter[RequestId]())

    def tokens_of(self, tenant: str, tokens: Counter[RequestId]) -> list[int]:
        return [tokens[request_id] for request_id, each in self.tenants.items() if each == tenant]


@pytest.fixture
def dear() -> Timed:
    """100 rows of one tenant next to 8 of another, where a row takes a fifth of a millisecond."""
    timed = Timed(row_ms=0.2)
    timed.add("many", 100)
    timed.steps(20)
    timed.add("few", 8)
    timed.steps(20)
    return timed


def test_many_rows_add_to_a_step_what_they_may_and_no_more(dear: Timed) -> None:
    took_ms, tokens = dear.steps(80)
    assert max(took_ms) <= 1.05 * (BASE_MS + 8 * 0.2 + ROWS_MS)
    assert set(dear.tokens_of("few", tokens)) == {80}  # a row in each step
    assert dear.scheduler.stats().share_rows_sat_out > 80 * 40


@pytest.mark.parametrize("grows_first", [True, False])
def test_rows_of_long_contexts_add_to_a_step_what_they_may(*, grows_first: bool) -> None:
    """Sixteen rows of one tenant next to sixteen of another, of which each takes five times as long, or comes to that.

    Rows alone told the two apart by nothing, and half of all rows could not be too many.
    """
    timed = Timed(row_ms=0.15, read_ms=0.0008)
    if grows_first:
        timed.add("long", 30, prompt_tokens=3)
        timed.steps(900)
    else:
        timed.add("long", 30, prompt_tokens=900)
        timed.steps(150)
    for _ in range(4):
        timed.add("few", 16, max_tokens=30)
        timed.steps(35)
    timed.add("few", 16, max_tokens=200)
    timed.steps(20)
    took_ms, tokens = timed.steps(120)
    alone_ms = BASE_MS + 16 * 0.15 + 16 * 140 * 0.0008
    assert max(took_ms) <= 1.1 * (alone_ms + max(ROWS_MS, 0.5 * alone_ms))
    assert min(timed.tokens_of("few", tokens)[-16:]) == 120
    assert min(timed.tokens_of("long", tokens)) > 0  # and all of them go on
    assert sum(timed.tokens_of("long", tokens)) > 120 * LEAST_ROWS


def test_rows_that_take_turns_all_go_on_alike(dear: Timed) -> None:
    _, tokens = dear.steps(8 * TURN_STEPS)
    of_many = dear.tokens_of("many", tokens)
    assert min(of_many) > 0
    assert max(of_many) - min(of_many) <= 2 * TURN_STEPS


def test_a_tenant_alone_has_all_its_rows_in_each_step() -> None:
    alone = Timed(row_ms=0.2)
    alone.add("many", 100)
    alone.steps(4)
    _, tokens = alone.steps(30)
    assert set(alone.tokens_of("many", tokens)) == {30}
    assert alone.scheduler.stats().share_rows_sat_out == 0


def test_where_rows_cost_little_none_sits_out() -> None:
    timed = Timed(row_ms=0.01)
    timed.add("many", 100)
    timed.steps(20)
    timed.add("few", 8)
    timed.steps(2)
    _, tokens = timed.steps(20)
    assert set(timed.tokens_of("many", tokens)) == {20}


def test_a_tenant_with_half_of_the_rows_has_them_in_each_step() -> None:
    timed = Timed(row_ms=1.0)
    for tenant in ("a", "b"):
        timed.add(tenant, 30)
    timed.steps(30)
    _, tokens = timed.steps(20)
    assert set(timed.tokens_of("a", tokens)) == set(timed.tokens_of("b", tokens)) == {20}


def test_few_rows_go_on_however_dear_they_are() -> None:
    timed = Timed(row_ms=100.0)
    timed.add("many", 50)
    timed.steps(30)
    timed.add("few", 1)
    timed.steps(2)
    for _ in range(20):
        _, tokens = timed.step()
        assert sum(each > 0 for each in timed.tokens_of("many", tokens)) >= LEAST_ROWS


@dataclass(frozen=True)
class Row:
    """Of a sequence, what decides whether it has a row."""

    request: GenerateRequest
    computed_tokens: int

    def __hash__(self) -> int:
        return hash(self.request.request_id)


def next_to_a_prompt() -> tuple[Timed, list[float], Counter[RequestId]]:
    """40 rows of one tenant, and a long prompt of another."""
    timed = Timed(row_ms=0.5, token_ms=0.3)
    timed.add("calm", 40)
    timed.steps(40)
    timed.add("loud", 1, prompt_tokens=2000, max_tokens=1)
    return timed, *timed.steps(60)


def test_a_prompt_of_one_tenant_takes_no_rows_of_another_out_of_a_step() -> None:
    timed, took_ms, tokens = next_to_a_prompt()
    assert set(timed.tokens_of("calm", tokens)) == {60}
    assert max(took_ms) > BASE_MS + 40 * 0.5 + 4.0  # the prompt went on meanwhile
    assert timed.scheduler.stats().share_rows_sat_out == 0


def test_where_prompts_count_as_rows_of_others_rows_would_sit_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test before this one would see of the scheduler as it was."""
    sitting_out = DecodeTurns.sitting_out
    request = GenerateRequest(
        request_id=RequestId(10**6), prompt_token_ids=(1,), sampling=SamplingParams(max_tokens=1), tenant="loud"
    )
    prompts: list[Any] = [Row(request, 1)]

    def with_prompts(
        self: DecodeTurns, ready: Iterable[Sequence], decoding: Iterable[Sequence], prompts_ms: Mapping[str, float]
    ) -> frozenset[Sequence]:
        return sitting_out(self, ready, [*decoding, *prompts], prompts_ms)

    monkeypatch.setattr(DecodeTurns, "sitting_out", with_prompts)
    timed, _, tokens = next_to_a_prompt()
    assert min(timed.tokens_of("calm", tokens)) < 50
    assert timed.scheduler.stats().share_rows_sat_out > 100


def test_where_most_rows_fit_none_sits_out_two_steps_one_after_the_other() -> None:
    timed = Timed(row_ms=0.5)
    timed.add("many", 24)
    timed.steps(20)
    timed.add("few", 14)  # whose rows take as long as 14 of the 24
    timed.steps(40)
    before = Counter[RequestId](range(24))
    for _ in range(40):
        _, now = timed.step()
        assert all(before[each] or now[each] for each in range(24))
        before = now
    assert timed.scheduler.stats().share_rows_sat_out > 100


def longest_wait(timed: Timed, *, num_steps: int, most_running: int) -> int:
    """The most steps that a request of `calm` waits for its first token, while other tenants' go on."""
    waits, longest = Counter[RequestId](), 0
    for _ in range(num_steps):
        _, tokens = timed.step()
        for each in tuple(waits):
            waits[each] += 1
            longest = max(longest, waits[each])
            if tokens[each]:
                del waits[each]
        if timed.scheduler.stats().running <= most_running and len(waits) < 4:
            timed.add("calm", 1, max_tokens=24)
            waits[max(timed.tenants)] = 0
    return longest


def newcomers_next_to_a_flood() -> tuple[Timed, int]:
    """A flood of prompts, and the most steps that a request of another tenant waits for its first token."""
    timed = Timed(row_ms=0.25, token_ms=0.3, num_slots=64, num_blocks=2**12)
    timed.add("calm", 24, max_tokens=24)
    timed.steps(10)
    timed.add("flood", 100, prompt_tokens=1000, max_tokens=1)
    return timed, longest_wait(timed, num_steps=600, most_running=24)


def newcomers_next_to_rows_that_resume() -> tuple[Timed, int]:
    """The same next to long rows that gave way to each other for want of blocks, and are computed again."""
    timed = Timed(row_ms=0.25, token_ms=0.3, num_slots=64, num_blocks=1200)
    timed.add("long", 60, prompt_tokens=40, max_tokens=300)
    timed.steps(150)
    longest = longest_wait(timed, num_steps=1500, most_running=60)
    assert timed.scheduler.stats().preemptions > 10
    return timed, longest


def test_newcomers_do_not_wait_for_the_prompt_of_a_tenant_that_would_be_next() -> None:
    """Its next prompt is the next to run, and waits for the budget that the one under way takes."""
    timed, longest = newcomers_next_to_a_flood()
    assert longest <= 6
    assert timed.scheduler.stats().prompt_tokens > 600 * 8  # and the flood's go on


def test_newcomers_do_not_wait_for_another_tenants_rows_to_resume() -> None:
    """Many give way, and others of them end at once: then the tenant is below its share, and all of them may resume."""
    timed, longest = newcomers_next_to_rows_that_resume()
    assert longest <= 20
    while timed.scheduler.stats().running:  # those that gave way go on, too: all end
        timed.step()
    assert timed.scheduler.stats().waiting == 0


def test_where_none_is_put_off_newcomers_would_wait_for_another_tenants_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test before this one would see of the scheduler as it was."""

    def without(self: RunQueue, tenants: AbstractSet[str]) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    monkeypatch.setattr(RunQueue, "putting_off", without)
    assert newcomers_next_to_a_flood()[1] > 20


def test_if_all_held_alike_newcomers_would_wait_for_another_tenants_rows_to_resume(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nothing(self: RowShares, tenant: str) -> float:
        return 0.0

    monkeypatch.setattr(RowShares, "held", nothing)
    assert newcomers_next_to_rows_that_resume()[1] > 40


def test_all_rows_come_back_when_the_other_tenant_has_ended() -> None:
    timed = Timed(row_ms=0.2)
    timed.add("many", 100)
    timed.steps(20)
    timed.add("few", 8, max_tokens=30)
    timed.steps(60)
    _, tokens = timed.steps(10)
    assert set(timed.tokens_of("many", tokens)) == {10}


def test_rows_leave_room_for_a_client_that_asks_again_a_moment_later() -> None:
    """Its next request would wait for a step of all rows of the other, and have its first token in one more."""
    timed = Timed(row_ms=0.2)
    timed.add("many", 100)
    timed.steps(20)
    for _ in range(3):
        timed.add("few", 8, max_tokens=30)
        timed.steps(30)  # the last of them ends
        took_ms, tokens = timed.steps(3)
        assert timed.tokens_of("few", tokens)[-8:] == [0] * 8
        timed.add("few", 8, max_tokens=2)
        took_ms += timed.steps(3)[0]
        assert max(took_ms) <= 1.05 * (BASE_MS + 8 * 0.2 + ROWS_MS)
    took_ms, _ = timed.steps(RECENT_STEPS + 2)
    assert took_ms[-1] == pytest.approx(BASE_MS + 100 * 0.2)


def test_a_newcomers_next_request_finds_the_slot_of_the_one_before() -> None:
    """The flood does not get what a client gives back for a moment, and gets it when the client has gone."""
    timed = Timed(row_ms=0.01, num_slots=32)
    timed.add("flood", 100)
    timed.steps(30)
    timed.add("few", 4, max_tokens=20)
    timed.steps(60)  # others have given way, and these have ended
    before = timed.scheduler.stats().share_preemptions
    assert before > 0
    for _ in range(5):
        timed.add("few", 4, max_tokens=20)
        timed.step()  # its prompt is in the first step
        _, tokens = timed.steps(20)
        assert set(timed.tokens_of("few", tokens)[-4:]) <= {19, 20}
        timed.steps(3)
    assert timed.scheduler.stats().share_preemptions == before
    timed.steps(200)
    assert timed.scheduler.stats().running == 32


def test_a_newcomers_next_request_finds_the_blocks_of_the_one_before() -> None:
    timed = Timed(row_ms=0.01, num_slots=64, num_blocks=100, max_model_tokens=128, prefix_cache=False)
    timed.add("flood", 400, prompt_tokens=24, max_tokens=40)
    timed.steps(20)
    timed.add("few", 2, prompt_tokens=60, max_tokens=20)  # 20 blocks each, within half of the pool
    timed.steps(30)
    for _ in range(4):
        assert free_blocks(timed) >= 30  # the flood grows into some of them, and takes none for its next
        timed.add("few", 2, prompt_tokens=60, max_tokens=20)
        timed.steps(30)
    timed.steps(140)
    assert min(free_blocks(timed) for _ in range(100) if timed.step()) < 15


def free_blocks(timed: Timed) -> int:
    stats = timed.scheduler.stats()
    return stats.blocks_total - stats.blocks_used


def test_rows_and_prompts_of_a_tenant_have_one_bound_together() -> None:
    timed = Timed(row_ms=0.5, token_ms=0.02)
    timed.add("calm", 8)
    timed.steps(40)
    alone_ms = BASE_MS + 0.5 * 8
    for _ in range(30):
        timed.add("loud", 8, prompt_tokens=1000)
        took_ms, _ = timed.steps(8)
    # a prompt has LEAST_TOKENS in any step, and a row for the first token
    assert max(took_ms[2:]) <= alone_ms + OTHERS_MS + 2.0
    assert timed.scheduler.stats().prompt_tokens > 1000


def test_rows_leave_room_for_dear_prompts_of_their_own_tenant() -> None:
    timed = Timed(row_ms=0.2, token_ms=0.3)
    timed.add("calm", 8)
    timed.steps(40)
    timed.add("loud", 60)
    timed.steps(60)
    timed.add("loud", 4, prompt_tokens=1000)
    timed.steps(5)
    took_ms, tokens = timed.steps(60)
    assert max(took_ms) <= 1.05 * (BASE_MS + 8 * 0.2 + 0.5 * ROWS_MS + 0.3 * LEAST_TOKENS)
    assert min(timed.tokens_of("calm", tokens)) == 60
    assert sum(timed.tokens_of("loud", tokens)) >= 60 * LEAST_ROWS


def test_prompts_are_short_steps_as_long_as_another_tenant_was_here_a_moment_ago() -> None:
    timed = Timed(row_ms=0.1, token_ms=0.02)
    timed.add("calm", 4, max_tokens=8)
    timed.steps(8)
    timed.add("loud", 200, prompt_tokens=2000, max_tokens=1)
    took_ms, _ = timed.steps(20)
    assert max(took_ms) <= BASE_MS + OTHERS_MS + 1.0  # its next request would wait for one of these
    took_ms, _ = timed.steps(250)
    assert BASE_MS + 0.8 * ALONE_MS < max(took_ms) <= BASE_MS + 1.1 * ALONE_MS  # it may be back within a minute
    timed.wait(COMPANY_S)
    timed.add("loud", 50, prompt_tokens=2000, max_tokens=1)
    took_ms, _ = timed.steps(20)
    assert max(took_ms) > BASE_MS + 0.02 * 4000  # and one tenant alone has whole steps


def test_first_prompts_of_a_tenant_are_no_long_step_for_another_that_asks_at_the_same_time() -> None:
    timed = Timed(row_ms=0.1, token_ms=0.5)
    for _ in range(10):
        timed.add("calm", 4, max_tokens=8)
        timed.steps(8)
    timed.add("calm", 4, max_tokens=8)
    timed.add("loud", 50, prompt_tokens=1000, max_tokens=1)
    took_ms, _ = timed.steps(4)
    assert max(took_ms) <= BASE_MS + 4 * 0.1 + 0.5 * (LEAST_TOKENS + 1) + 1.0


def test_dear_prompts_of_a_tenant_that_expects_company_go_on_in_chunks_that_are_worth_a_step() -> None:
    timed = Timed(row_ms=0.1, token_ms=5.0)
    timed.add("calm", 1, max_tokens=2)
    timed.add("loud", 1)
    timed.steps(150)
    timed.add("loud", 1, prompt_tokens=1000, max_tokens=1)
    took_ms, _ = timed.steps(10)
    assert max(took_ms[2:]) == pytest.approx(BASE_MS + 5.0 * ALONE_TOKENS, rel=0.05)


def test_many_newcomers_find_room_at_once_where_another_tenant_has_all_slots() -> None:
    timed = Timed(row_ms=0.1, num_slots=32)
    timed.add("loud", 64)
    timed.steps(40)
    timed.add("calm", 16)
    _, tokens = timed.steps(4)  # of which one was planned before, and one waits for what gives way
    assert sum(each > 0 for each in timed.tokens_of("calm", tokens)) >= 12
    _, tokens = timed.steps(4)
    assert min(timed.tokens_of("calm", tokens)) > 0


def test_prompt_larger_than_its_share_does_not_wait_for_others_to_end_next_to_an_idle_tenants_prefix() -> None:
    timed = Timed(row_ms=0.1, num_blocks=100)
    timed.add("idle", 1, prompt_tokens=160, max_tokens=1)
    timed.steps(1)
    timed.add("calm", 1, max_tokens=100)
    timed.steps(4)
    timed.add("large", 1, prompt_tokens=260, max_tokens=1)
    _, tokens = timed.steps(8)
    assert timed.tokens_of("large", tokens)[0] > 0
    assert timed.tokens_of("calm", tokens)[0] >= 7
