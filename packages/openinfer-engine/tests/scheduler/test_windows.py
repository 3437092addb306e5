"""Block tables with windows: what is given back, what a chunk gets, who waits, and how much more fits."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from openinfer_core import Failed, GenerateRequest, RequestId, TokenEvent
from openinfer_core.errors import Refused
from openinfer_core.queue_policies import FirstComeFirstServed
from openinfer_core.scheduling import QueuePolicy, QueuePolicyConfig, SchedulerConfig, StepPlan, StepResult
from openinfer_core.testing import ConformanceError
from openinfer_core.testing.scheduler_driver import SchedulerDriver
from openinfer_core.testing.scheduler_tables import check_tables
from openinfer_core.testing.scheduler_traffic import make_request as kit_request
from openinfer_engine.scheduler import TokenBudgetScheduler
from openinfer_engine.scheduler.sequence import SequenceState
from openinfer_kv_cache import Digest, StoredBlocks
from openinfer_kv_cache.testing.fake_tier_port import NEVER, TieredDriver

BLOCK_TOKENS = 4


def rows(plan: StepPlan | None) -> list[tuple[int, int]]:
    """(start, count) of each row."""
    return [] if plan is None else list(zip(plan.starts.tolist(), plan.counts.tolist(), strict=True))


def first_seen(position: int, window: int) -> int:
    return max(0, position - window + 1) // BLOCK_TOKENS


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_long_output_holds_its_windows_and_no_more(make_driver: Any, make_request: Any, prefix_cache: bool) -> None:
    driver = make_driver(table_windows=(None, 8, 5), prefix_cache=prefix_cache)
    driver.submit(make_request(0, (1, 2, 3), max_tokens=58))
    used: list[int] = []
    while driver.scheduler.unfinished_ids:
        plan = driver.step()
        start = int(plan.starts[0])
        assert plan.void_block_counts.tolist() == [[0], [first_seen(start, 8)], [first_seen(start, 5)]]
        used.append(driver.scheduler.stats().blocks_used)
    assert max(used) <= 60 // BLOCK_TOKENS + 3 + 3
    driver.run()


def test_one_table_may_have_a_window(make_driver: Any, make_request: Any) -> None:
    driver = make_driver(table_windows=(8,), num_blocks=4)
    driver.submit(make_request(0, tuple(range(30)), max_tokens=30))
    driver.run()
    assert len(driver.accounts[0].token_ids) == 30
    assert driver.scheduler.stats().preemptions == 0


def test_chunk_is_as_long_as_there_are_blocks(make_driver: Any, make_request: Any) -> None:
    """13 blocks: 10 for the table that sees everything, 3 for the one that sees a block."""
    driver = make_driver(table_windows=(None, 4), num_blocks=13, max_step_tokens=64)
    driver.submit(make_request(0, tuple(range(40)), max_tokens=1))
    plans = [driver.step() for _ in range(5)]
    assert [rows(plan) for plan in plans] == [[(0, 12)], [(12, 8)], [(20, 8)], [(28, 8)], [(36, 4)]]
    assert plans[0].new_block_counts.tolist() == [[10], [3]]
    driver.run()


def test_chunk_waits_for_the_blocks_that_the_one_in_flight_gives_back(make_driver: Any, make_request: Any) -> None:
    driver = make_driver(table_windows=(None, 4), num_blocks=13, max_step_tokens=64, max_in_flight=2)
    driver.submit(make_request(0, tuple(range(40)), max_tokens=1))
    assert rows(driver.plan()) == [(0, 12)]
    assert driver.plan() is None
    driver.apply()
    assert rows(driver.plan()) == [(12, 8)]
    driver.run()
    assert driver.scheduler.stats().preemptions == 0


def test_chunk_leaves_decode_rows_their_next_blocks(make_driver: Any, make_request: Any) -> None:
    driver = make_driver(table_windows=(None, 4), num_blocks=20, max_step_tokens=64)
    driver.submit(make_request(0, (1,), max_tokens=30))
    driver.step()
    driver.submit(make_request(1, tuple(range(40)), max_tokens=1))
    assert rows(driver.plan()) == [(1, 1), (0, 24)]
    assert driver.scheduler.stats().blocks_used == 20 - 2
    driver.run()
    assert driver.scheduler.stats().preemptions == 0


def test_longest_context_of_a_pool_runs_by_itself_and_one_longer_is_refused(
    make_driver: Any, make_request: Any
) -> None:
    driver = make_driver(table_windows=(None, 4, 4), num_blocks=10 + 3 + 3, max_step_tokens=64)
    refusal = driver.submit(make_request(0, tuple(range(39)), max_tokens=3))
    assert isinstance(refusal, Failed)
    assert refusal.message.startswith(
        "prompt and completion need KV memory for 41 tokens and this engine has it for 40;"
    )
    assert driver.submit(make_request(1, tuple(range(39)), max_tokens=2)) is None
    driver.run()
    assert len(driver.accounts[1].token_ids) == 2


def test_prefix_hit_begins_with_void_entries_and_takes_the_last_window_alone(
    make_driver: Any, make_request: Any
) -> None:
    driver = make_driver(table_windows=(None, 8), max_step_tokens=64)
    driver.submit(make_request(0, tuple(range(40)), max_tokens=1))
    driver.run()
    driver.submit(make_request(1, (*range(40), 7, 7), max_tokens=1))
    plan = driver.plan()
    assert rows(plan) == [(40, 2)]
    # Positions 33 and later are seen: blocks 8, 9, and the new one.
    assert plan.void_block_counts.tolist() == [[0], [8]]
    assert plan.new_block_counts.tolist() == [[11], [3]]
    driver.run()


def test_prefix_whose_last_window_is_gone_is_found_where_one_is_left(make_driver: Any, make_request: Any) -> None:
    """Next turns of a chat need the window before them; what a window leaves stays cached until it is evicted."""
    driver = make_driver(table_windows=(None, 8), num_blocks=24, max_step_tokens=64)
    driver.submit(make_request(0, tuple(range(40)), max_tokens=1))
    driver.run()
    cached: list[int] = []
    for request_id, length in enumerate((40, 20), start=1):
        driver.submit(make_request(request_id, (*range(length), 9), max_tokens=1))
        driver.run()
        cached.append(driver.accounts[request_id].scheduled.cached_tokens)
    assert cached == [40, 20]


def test_window_gives_back_what_is_behind_the_true_length_while_drafts_are_in_flight(
    make_driver: Any, make_request: Any
) -> None:
    """The bound is ahead of the true length; the fake device refuses void entries that its row sees."""
    driver = make_driver(table_windows=(None, 2), max_drafts=7, max_in_flight=2)
    driver.submit(make_request(0, (1, 2, 3), max_tokens=40))
    driver.run()
    assert len(driver.accounts[0].token_ids) == 40


def test_preempted_sequence_resumes_on_the_window_that_is_still_cached(make_driver: Any, make_request: Any) -> None:
    driver = make_driver(table_windows=(None, 4), num_blocks=15, max_num_seqs=2)
    driver.submit(make_request(0, (1,) * 8, max_tokens=16))
    driver.submit(make_request(1, (2,) * 8, max_tokens=30))
    resumed: list[tuple[int, list[int]]] = []
    while driver.scheduler.unfinished_ids:
        plan = driver.step()
        for start in plan.started if plan else ():
            row = plan.slots.tolist().index(start.slot)
            resumed.append((int(plan.starts[row]), plan.void_block_counts[:, row].tolist()))
    assert driver.scheduler.stats().preemptions > 0
    starts, voids = zip(*resumed[2:], strict=True)
    assert min(starts) > 0
    assert all(void[1] > 0 for void in voids)
    driver.run()


def test_recurrent_states_beside_several_tables_are_refused() -> None:
    config = SchedulerConfig(
        num_blocks=8,
        block_size_tokens=4,
        max_num_seqs=2,
        max_step_tokens=8,
        max_model_tokens=16,
        table_windows=(None, 4),
        prefix_cache=False,
        num_snapshots=2,
    )
    with pytest.raises(Refused, match=r"num_snapshots is 2 and table_windows \(None, 4\)"):
        TokenBudgetScheduler(config, FirstComeFirstServed(QueuePolicyConfig()))


def most_running(**tables: Any) -> int:
    """How many of 24 contexts of 125 tokens run side by side, each preempted seldom or never."""
    config = SchedulerConfig(
        block_size_tokens=BLOCK_TOKENS, max_num_seqs=24, max_step_tokens=128, max_model_tokens=128, **tables
    )
    driver = SchedulerDriver(TokenBudgetScheduler, config)
    requests = [kit_request(index, prompt=(index,) * 100, max_tokens=25) for index in range(24)]
    for request in requests:
        driver.submit(request)
    most = 0
    while driver.scheduler.unfinished_ids:
        driver.step()
        most = max(most, driver.scheduler.stats().running)
    assert driver.scheduler.stats().preemptions <= 6
    driver.run()
    return most


def test_pool_holds_more_long_contexts_with_windows_than_with_one_table() -> None:
    """Six layers in one block, or six blocks of a layer each: the same memory, and one layer of six sees everything."""
    whole = most_running(num_blocks=128)
    windowed = most_running(num_blocks=6 * 128, table_windows=(None, *(8,) * 5))
    assert whole == 4
    assert windowed >= 3 * whole


# --- KV tiers -------------------------------------------------------------------------------------------

PROMPT = tuple(range(41))


def tiered_driver(factory: type[TokenBudgetScheduler]) -> TieredDriver:
    """One that has served `PROMPT`, and then others that took the whole pool."""
    config = SchedulerConfig(
        num_blocks=20,
        block_size_tokens=BLOCK_TOKENS,
        table_windows=(None, 8),
        max_num_seqs=4,
        max_step_tokens=16,  # only a share of the pool is saved at a time
        max_model_tokens=64,
    )
    driver = TieredDriver(factory, config)
    for index, prompt in enumerate((PROMPT, (50,) * 60, (51,) * 60)):
        driver.submit(kit_request(index, prompt=prompt, max_tokens=1))
        driver.run()
    return driver


def cached_tokens(driver: SchedulerDriver, request: GenerateRequest) -> int:
    driver.submit(request)
    driver.run()
    scheduled = driver.accounts[request.request_id].scheduled
    assert scheduled is not None
    return scheduled.cached_tokens


@pytest.mark.parametrize("steps", [1, 5])
def test_evicted_prefix_comes_back_as_far_as_each_table_sees_it(
    checked_scheduler: type[TokenBudgetScheduler], steps: int
) -> None:
    driver = tiered_driver(checked_scheduler)
    driver.port.load_steps = steps
    assert cached_tokens(driver, kit_request(9, prompt=PROMPT, max_tokens=2)) == 40
    assert driver.port.loads[-1].num_blocks == 10 + 2
    assert driver.scheduler.stats().tier_tokens == 40


def test_prefix_of_which_a_load_brings_a_part_is_matched_again_and_computed(
    checked_scheduler: type[TokenBudgetScheduler],
) -> None:
    driver = tiered_driver(checked_scheduler)
    driver.port.short_rate = 1.0
    assert cached_tokens(driver, kit_request(9, prompt=PROMPT, max_tokens=2)) == 0
    assert driver.scheduler.stats().tier_tokens == 0
    assert len(driver.port.loads) == 1


def test_prefix_is_loaded_up_to_where_the_tiers_have_the_window_before_it(
    checked_scheduler: type[TokenBudgetScheduler],
) -> None:
    """Of a prompt that leaves the first one after 20 tokens, what it saw there is in the tiers."""
    driver = tiered_driver(checked_scheduler)
    assert cached_tokens(driver, kit_request(9, prompt=(*PROMPT[:20], 60), max_tokens=2)) == 20
    assert driver.port.loads[-1].num_blocks == 5 + 2


def test_aborted_load_gives_every_tables_blocks_back(checked_scheduler: type[TokenBudgetScheduler]) -> None:
    driver = tiered_driver(checked_scheduler)
    driver.port.load_steps = NEVER
    driver.submit(kit_request(9, prompt=PROMPT, max_tokens=2))
    driver.step()
    assert driver.scheduler.stats().loading == 1
    driver.abort(RequestId(9))
    driver.submit(kit_request(10, prompt=(52,) * 60, max_tokens=1))
    driver.run()
    assert len(driver.accounts[RequestId(10)].token_ids) == 1


class Heard:
    """A listener that keeps which blocks can be found."""

    def __init__(self) -> None:
        self.tables: dict[Digest, int] = {}

    def stored(self, blocks: StoredBlocks) -> None:
        self.tables |= dict.fromkeys(blocks.digests, blocks.table)

    def removed(self, digests: Sequence[Digest]) -> None:
        for digest in digests:
            del self.tables[digest]

    def cleared(self) -> None:
        self.tables.clear()


def test_listener_hears_of_the_blocks_of_each_table(make_driver: Any, make_request: Any) -> None:
    """What lies behind a window can be found until the space is needed: then that goes first."""
    driver, heard = make_driver(table_windows=(None, 8), num_blocks=24), Heard()
    driver.scheduler.listen(heard)
    driver.submit(make_request(0, PROMPT, max_tokens=1))
    driver.run()
    assert Counter(heard.tables.values()) == {0: 10, 1: 10}
    driver.submit(make_request(1, (50,) * 20, max_tokens=1))
    driver.run()
    assert Counter(heard.tables.values()) == {0: 10 + 5, 1: 4 + 5}
    driver.scheduler.flush_cache()
    assert not heard.tables


# --- the kit catches a broken one -----------------------------------------------------------------------


class FreesUpToTheBound(TokenBudgetScheduler):
    """Takes the planned end of a row for what is computed, as if all drafts had been accepted."""

    def apply(self, plan: StepPlan, result: StepResult, *, now_s: float) -> list[TokenEvent]:
        rows = list(zip(self._in_flight[0].rows, self._in_flight[0].ends, strict=True))
        events = super().apply(plan, result, now_s=now_s)
        windows = self._queue.windows
        for sequence, end in rows:
            if windows is not None and sequence.state is SequenceState.RUNNING:
                sequence.kv.free_behind_windows(end, unsealed=True)
                windows.start(sequence)
        return events


class SeesOneTokenLess(TokenBudgetScheduler):
    def __init__(self, config: SchedulerConfig, policy: QueuePolicy) -> None:
        windows = tuple(window and max(1, window - 1) for window in config.table_windows)
        super().__init__(msgspec.structs.replace(config, table_windows=windows), policy)


class NeverFrees(TokenBudgetScheduler):
    def apply(self, plan: StepPlan, result: StepResult, *, now_s: float) -> list[TokenEvent]:
        windows, self._queue.windows = self._queue.windows, None
        events = super().apply(plan, result, now_s=now_s)
        self._queue.windows = windows
        return events


class TellsOfNoVoidEntry(TokenBudgetScheduler):
    def plan(self, *, now_s: float) -> StepPlan | None:
        plan = super().plan(now_s=now_s)
        if plan is not None:
            plan.void_block_counts[:] = 0
        return plan


class TakesTheTablesInAnotherOrder(TokenBudgetScheduler):
    def plan(self, *, now_s: float) -> StepPlan | None:
        plan = super().plan(now_s=now_s)
        if plan is not None and plan.step and not plan.started:
            ends = np.cumsum(plan.new_block_counts.sum(axis=1))
            tables = np.split(plan.new_blocks, ends[:-1])
            if len({len(table) for table in tables}) == 1:
                plan.new_blocks[:] = np.concatenate(tables[::-1])
        return plan


@pytest.mark.parametrize(
    ("mutant", "message"),
    [
        (FreesUpToTheBound, "are void, and it reads that table from position"),
        (SeesOneTokenLess, "are void, and it reads that table from position|can never fit"),
        (NeverFrees, "what lies behind a window is not given back"),
        (TellsOfNoVoidEntry, "have room for|holds|void, and"),
        (TakesTheTablesInAnotherOrder, "holds the KV of|holds nothing"),
    ],
)
def test_kit_refuses_a_scheduler_whose_windows_are_wrong(mutant: type[TokenBudgetScheduler], message: str) -> None:
    with pytest.raises(ConformanceError, match=message):
        check_tables(mutant)
