"""Any order of requests, plans, results, aborts and faults, in a pool so small that preemption is certain.

The driver compares every token with the fake model and every KV entry with what was written; the books are compared
after each rule.
"""

from collections.abc import Callable
from typing import Any, ClassVar

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

from openinfer_core import GenerateRequest, RequestId, RetainedPrefix, SamplingParams
from openinfer_core.queue_policies import FairShare, FirstComeFirstServed, Priority
from openinfer_core.sampling import Grammar, GrammarKind
from openinfer_core.scheduling import FlushesCache, QueuePolicyConfig, SchedulerConfig
from openinfer_core.testing.fake_drafter import DraftScript
from openinfer_core.testing.fake_model import NUM_TOKEN_IDS
from openinfer_core.testing.scheduler_driver import SchedulerDriver
from openinfer_engine.scheduler import TokenBudgetScheduler

POLICIES = (FirstComeFirstServed, Priority, FairShare)
TENANTS = QueuePolicyConfig(tenant_weights={"u": 3.0})
MAX_MODEL_TOKENS = 20
PREFIXES = ((), (1, 2, 3, 4), (1, 2, 3, 4, 5, 6, 7, 8))

sampling = st.builds(
    SamplingParams,
    max_tokens=st.sampled_from((1, 3, 12, 40)),
    min_tokens=st.sampled_from((0, 1)),
    stop_token_ids=st.sampled_from(((), (5, 6), tuple(range(0, NUM_TOKEN_IDS, 4)), tuple(range(NUM_TOKEN_IDS - 1)))),
    logprobs=st.sampled_from((None, 0)),
    prompt_logprobs=st.sampled_from((None, None, None, 0)),
    seed=st.sampled_from((None, 3)),
    grammar=st.sampled_from((None, None, Grammar(kind=GrammarKind.REGEX, text=".*"))),
)


DAY_S, AT_ONCE_S = 86_400.0, 1e-9
RETENTIONS = st.sampled_from(
    (
        {},
        {},
        {"retain_s": DAY_S},
        {"retain_s": AT_ONCE_S},
        {"retain_s": DAY_S, "cache_key": "k"},
        {"retain_s": DAY_S, "cache_key": "j"},
        {"retain_s": AT_ONCE_S, "cache_key": "k"},
        {"retained_prefixes": (RetainedPrefix(1, DAY_S),)},
        {"retained_prefixes": (RetainedPrefix(1, DAY_S),), "retain_s": AT_ONCE_S, "cache_key": "k"},
    )
)
"""Of a pool that is too small for two: nothing may wait for any of it."""

ONE_TABLE = st.just((None,))
# Within a block, about a block, longer than a chunk, and beyond the longest context.
WINDOWS = st.sampled_from((1, 2, 3, 4, 5, 9, 30))
SEVERAL_TABLES = st.builds(
    lambda num_global, windows: (None,) * num_global + tuple(windows),
    st.integers(0, 2),
    st.lists(WINDOWS, min_size=1, max_size=2),
)


class SchedulerMachine(RuleBasedStateMachine):
    driver: SchedulerDriver
    total_preemptions: ClassVar[list[int]]
    tables: ClassVar[st.SearchStrategy[tuple[int | None, ...]]]

    def __init__(self) -> None:
        super().__init__()
        self.num_requests = 0

    @initialize(
        block_size_tokens=st.sampled_from((1, 2, 4)),
        extra_blocks=st.integers(0, 3),
        max_num_seqs=st.integers(2, 5),
        extra_tokens=st.integers(0, 8),
        prefix_cache=st.booleans(),
        num_snapshots=st.sampled_from((0, 0, 1, 3, 9)),
        max_itl_ms=st.sampled_from((None, None, 1, 5)),
        policy=st.sampled_from(POLICIES),
        max_drafts=st.sampled_from((0, 0, 3)),
        drafts=st.sampled_from(DraftScript),
        data=st.data(),
    )
    def make(
        self,
        *,
        block_size_tokens: int,
        extra_blocks: int,
        max_num_seqs: int,
        extra_tokens: int,
        prefix_cache: bool,
        num_snapshots: int,
        max_itl_ms: int | None,
        policy: Callable[[QueuePolicyConfig], Any],
        max_drafts: int,
        drafts: DraftScript,
        data: st.DataObject,
    ) -> None:
        table_windows = data.draw(self.tables)
        num_snapshots = num_snapshots if table_windows == (None,) else 0
        config = SchedulerConfig(
            num_blocks=1,
            block_size_tokens=block_size_tokens,
            table_windows=table_windows,
            max_drafts=max_drafts,
            max_num_seqs=max_num_seqs,
            max_step_tokens=max_num_seqs + extra_tokens,
            max_model_tokens=MAX_MODEL_TOKENS,
            max_waiting=8,
            prefix_cache=prefix_cache and not num_snapshots,
            num_snapshots=num_snapshots,
            max_itl_ms=max_itl_ms,
        )
        # The longest request computes all positions but the last: down to what that one needs by itself.
        least_blocks = config.blocks_for_context(MAX_MODEL_TOKENS - 1)
        config = msgspec.structs.replace(config, num_blocks=least_blocks + extra_blocks)
        self.driver = SchedulerDriver(TokenBudgetScheduler, config, policy=policy(TENANTS), drafts=drafts)

    @rule(
        prefix=st.sampled_from(PREFIXES),
        own=st.lists(st.integers(0, NUM_TOKEN_IDS - 1), min_size=1, max_size=9),
        sampling=sampling,
        cache_salt=st.sampled_from((None, None, "a")),
        lora=st.sampled_from((None, None, "x")),
        tenant=st.sampled_from(("", "t", "u")),
        priority=st.integers(-1, 1),
        retention=RETENTIONS,
        choices=st.sampled_from((1, 1, 1, 3)),
    )
    def submit(
        self, *, prefix: tuple[int, ...], own: list[int], retention: dict[str, Any], choices: int, **fields: Any
    ) -> None:
        for choice in range(choices):
            request_id = RequestId(self.num_requests)
            self.num_requests += 1
            request = GenerateRequest(
                request_id=request_id, prompt_token_ids=(*prefix, *own), choice=choice, **fields, **retention
            )
            self.driver.submit(request)

    @rule(
        num_requests=st.integers(2, 5),
        first=st.integers(0, NUM_TOKEN_IDS - 1),
        tenant=st.sampled_from(("", "u")),
    )
    def submit_long_outputs(self, *, num_requests: int, first: int, tenant: str) -> None:
        """Short prompts that grow to the longest context: together they cannot stay."""
        for prompt in range(num_requests):
            request = GenerateRequest(
                request_id=RequestId(self.num_requests),
                prompt_token_ids=(first, prompt),
                sampling=SamplingParams(max_tokens=MAX_MODEL_TOKENS),
                tenant=tenant,
            )
            self.num_requests += 1
            self.driver.submit(request)

    @precondition(lambda self: self.driver.num_in_flight < 2)
    @rule()
    def plan(self) -> None:
        self.driver.plan()

    @precondition(lambda self: self.driver.num_in_flight)
    @rule()
    def apply(self) -> None:
        self.driver.apply()

    @rule(steps=st.integers(1, 12))
    def step(self, *, steps: int) -> None:
        for _ in range(steps):
            self.driver.step()
            self.driver.scheduler.check_integrity()

    @precondition(lambda self: not self.driver.num_in_flight)
    @rule()
    def flush_the_cache(self) -> None:
        """As after a change of weights, but for the fake model's: what runs goes on."""
        assert isinstance(self.driver.scheduler, FlushesCache)
        self.driver.scheduler.flush_cache()

    @precondition(lambda self: self.num_requests)
    @rule(data=st.data())
    def abort(self, *, data: st.DataObject) -> None:
        self.driver.abort(RequestId(data.draw(st.integers(max(0, self.num_requests - 8), self.num_requests))))

    @precondition(lambda self: self.num_requests)
    @rule(data=st.data())
    def fail_a_row(self, *, data: st.DataObject) -> None:
        request_id = data.draw(st.integers(max(0, self.num_requests - 8), self.num_requests - 1))
        self.driver.device.fail_next_row(RequestId(request_id))

    @invariant()
    def books_agree(self) -> None:
        self.driver.scheduler.check_integrity()

    def teardown(self) -> None:
        self.driver.run()
        self.driver.scheduler.check_integrity()
        self.total_preemptions.append(self.driver.scheduler.stats().preemptions)


@pytest.mark.parametrize(
    ("block_tables", "max_examples"),
    [pytest.param(ONE_TABLE, 120, id="one table"), pytest.param(SEVERAL_TABLES, 120, id="windows")],
)
def test_any_order_of_events_keeps_the_books_and_the_tokens_right(
    block_tables: st.SearchStrategy[tuple[int | None, ...]], max_examples: int
) -> None:
    class Machine(SchedulerMachine):
        total_preemptions: ClassVar[list[int]] = []
        tables = block_tables

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert sum(Machine.total_preemptions) > max_examples
