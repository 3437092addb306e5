"""`PlanCheck` takes every plan of schedulers that keep the contract, and names what is wrong with others."""

import dataclasses
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import numpy as np
import pytest

from openinfer_core import EngineStats, GenerateRequest, RequestId, SamplingParams, TokenEvent
from openinfer_core.queue_policies import FirstComeFirstServed
from openinfer_core.sampling import Grammar, GrammarKind
from openinfer_core.scheduling import (
    QueuePolicy,
    QueuePolicyConfig,
    SchedulerConfig,
    SlotStart,
    StateCopy,
    StepPlan,
    StepResult,
)
from openinfer_core.testing.scheduler import SCHEDULER_CHECKS, SchedulerCheck
from openinfer_engine.guard import PlanCheck
from openinfer_engine.guard.errors import BadPlan
from openinfer_engine.scheduler import TokenBudgetScheduler

NUM_TOKEN_IDS = 1000


class Checked:
    """A scheduler whose plans all pass through a check."""

    def __init__(self, config: SchedulerConfig, policy: QueuePolicy) -> None:
        self.scheduler = TokenBudgetScheduler(config, policy)
        self.check = PlanCheck(config, num_token_ids=NUM_TOKEN_IDS)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.scheduler, name)

    def plan(self, *, now_s: float) -> StepPlan | None:
        plan = self.scheduler.plan(now_s=now_s)
        if plan is not None:
            self.check.check(plan)
        return plan

    def apply(self, plan: StepPlan, result: StepResult, *, now_s: float) -> list[TokenEvent]:
        self.check.applied(plan, result)
        return self.scheduler.apply(plan, result, now_s=now_s)

    def stats(self) -> EngineStats:
        return self.scheduler.stats()


@pytest.mark.parametrize("check", SCHEDULER_CHECKS, ids=attrgetter("__name__"))
def test_every_plan_of_our_scheduler_passes(check: SchedulerCheck) -> None:
    check(Checked)


# --- mutants ------------------------------------------------------------------------------------------------


CONFIG = SchedulerConfig(
    num_blocks=64, block_size_tokens=4, max_num_seqs=4, max_step_tokens=16, max_model_tokens=64, max_drafts=3
)
Change = Callable[[StepPlan], dict[str, Any]]


def ints(*values: int) -> Any:
    return np.array(values, np.int32)


def request(index: int, *, prompt: int = 6, grammar: Grammar | None = None) -> GenerateRequest:
    return GenerateRequest(
        request_id=RequestId(index),
        prompt_token_ids=tuple(range(1, prompt + 1)),
        sampling=SamplingParams(max_tokens=20, grammar=grammar),
        cache_salt=str(index),
    )


class Run:
    """Our scheduler and a check; steps are applied one plan late."""

    def __init__(self, *requests: GenerateRequest) -> None:
        policy = FirstComeFirstServed(QueuePolicyConfig())
        self.scheduler = TokenBudgetScheduler(CONFIG, policy)
        self.check = PlanCheck(CONFIG, num_token_ids=NUM_TOKEN_IDS)
        for each in requests:
            self.scheduler.add(each, now_s=0.0)

    def plan(self) -> StepPlan:
        plan = self.scheduler.plan(now_s=0.0)
        assert plan is not None
        return plan

    def step(self) -> StepPlan:
        plan = self.plan()
        self.check.check(plan)
        return plan

    def apply(self, plan: StepPlan) -> None:
        result = StepResult.of_single_tokens(np.where(plan.max_new > 0, 7, -1).astype(np.int32))
        self.check.applied(plan, result)
        self.scheduler.apply(plan, result, now_s=0.0)


FIRST: dict[str, tuple[Change, str]] = {
    "slot-out-of-range": (lambda plan: {"slots": ints(0, 255)}, "slots are 0 .. 3; the plan names 255"),
    "slot-negative": (lambda plan: {"slots": ints(0, -1)}, "slots are 0 .. 3; the plan names -1"),
    "slot-twice": (lambda plan: {"slots": ints(0, 0), "started": plan.started[:1]}, "slots 0 have more than one row"),
    "slot-never-started": (lambda plan: {"started": plan.started[:1]}, "slots 1 have rows, and no sequence"),
    "started-without-a-row": (
        lambda plan: {"started": (*plan.started, dataclasses.replace(plan.started[0], slot=2))},
        "slot 2 is started and has no row|request 0 is started in a second slot",
    ),
    "started-out-of-range": (
        lambda plan: {"started": (dataclasses.replace(plan.started[0], slot=9), plan.started[1])},
        "slot 9 is started; slots are 0 .. 3",
    ),
    "started-twice": (lambda plan: {"started": (plan.started[0], *plan.started)}, "slot 0 is started, and was not"),
    "start-beyond-the-prompt": (lambda plan: {"starts": ints(6, 0)}, "slot 0 begins at position 6; its request has 6"),
    "start-negative": (lambda plan: {"starts": ints(-1, 0)}, "slot 0 begins at position -1"),
    "count-zero": (
        lambda plan: {"counts": ints(0, 6), "num_host_tokens": ints(0, 6), "token_ids": plan.token_ids[6:]},
        "counts is below 1, in the rows of slots 0",
    ),
    "over-budget": (lambda plan: {"counts": ints(6, 11)}, "17 tokens in one step; max_step_tokens is 16"),
    "count-overflows": (lambda plan: {"counts": ints(2**31 - 1, 1)}, "tokens in one step"),
    "ids-missing": (lambda plan: {"token_ids": plan.token_ids[1:]}, "num_host_tokens sums up to 12; token_ids has 11"),
    "ids-of-no-token": (lambda plan: {"token_ids": ints(*[NUM_TOKEN_IDS] * 12)}, "token_ids are 0 .. 999"),
    "ids-negative": (lambda plan: {"token_ids": ints(*[-1] * 12)}, "token_ids are 0 .. 999; the plan|token_ids are"),
    "device-id-never-sampled": (
        lambda plan: {"num_host_tokens": ints(5, 6), "token_ids": plan.token_ids[1:]},
        "no id was sampled in the slot to go on from, in the rows of slots 0",
    ),
    "two-device-ids": (
        lambda plan: {"num_host_tokens": ints(4, 6), "token_ids": plan.token_ids[2:]},
        "counts differs from its ids by more than one",
    ),
    "more-ids-than-count": (
        lambda plan: {"counts": ints(5, 6)},
        "counts differs from its ids by more than one",
    ),
    "yields-more-than-it-computes": (lambda plan: {"max_new": ints(7, 1)}, "max_new is above counts"),
    "yields-a-negative-number": (lambda plan: {"max_new": ints(-1, 1)}, "max_new is negative"),
    "drafts-without-new-tokens": (lambda plan: {"draft_counts": ints(1, 0)}, "draft_counts is above max_new - 1"),
    "drafts-beyond-the-drafter": (
        lambda plan: {"draft_counts": ints(4, 0), "max_new": ints(5, 1)},
        "draft_counts is above max_drafts, 3",
    ),
    "blocks-out-of-range": (lambda plan: {"new_blocks": plan.new_blocks + np.int32(64)}, "blocks are 0 .. 63"),
    "blocks-negative": (lambda plan: {"new_blocks": plan.new_blocks - np.int32(64)}, "blocks are 0 .. 63"),
    "blocks-uncounted": (lambda plan: {"new_block_counts": ints(2, 1)}, "new_block_counts sums up to 3"),
    "blocks-of-two-slots": (lambda plan: {"new_blocks": ints(5, 6, 6, 7)}, "block 6 is appended to slot"),
    "block-twice-in-one-slot": (lambda plan: {"new_blocks": ints(5, 5, 6, 7)}, "block 5 is appended to slot 0"),
    "too-few-blocks": (
        lambda plan: {"new_block_counts": ints(1, 2), "new_blocks": plan.new_blocks[1:]},
        "ends at position 6; its 1 blocks have room for 4",
    ),
    "wrong-step": (lambda plan: {"step": 1}, "step 1 was planned; the next one is 0"),
    "no-rows": (lambda plan: dict.fromkeys((*COLUMNS, "draft_counts"), ints()), "a plan without rows"),
    "wide-column": (
        lambda plan: {"starts": plan.starts.astype(np.int64)},
        "starts must be .* of int32; it is one of int64",
    ),
    "two-dimensional": (lambda plan: {"counts": plan.counts.reshape(1, 2)}, "counts must be a one-dimensional"),
    "no-array": (lambda plan: {"slots": [0, 1]}, "slots must be a one-dimensional array"),
    "short-column": (lambda plan: {"max_new": ints(1)}, "max_new has 1 entries for 2 rows"),
    "released-never-started": (lambda plan: {"released": (3,)}, "slot 3 is released, and no sequence is in it"),
    "released-out-of-range": (lambda plan: {"released": (4,)}, "slot 4 is released; slots are 0 .. 3"),
    "copies-states-of-a-model-without": (
        lambda plan: {"state_restores": (StateCopy(source=4, target=0),)},
        "this engine has 0 state slots for copies",
    ),
}
COLUMNS = ("slots", "starts", "counts", "num_host_tokens", "max_new", "token_ids", "new_block_counts", "new_blocks")


@pytest.mark.parametrize("name", FIRST)
def test_first_plan_that_breaks_the_contract_is_named(name: str) -> None:
    change, message = FIRST[name]
    run = Run(request(0), request(1))
    plan = run.plan()
    assert plan.slots.tolist() == [0, 1]
    with pytest.raises(BadPlan, match=message):
        run.check.check(dataclasses.replace(plan, **{"draft_counts": ints(*[0] * len(plan.slots)), **change(plan)}))


NEXT: dict[str, tuple[Change, str]] = {
    "skips-a-position": (
        lambda plan: {"starts": ints(7, 6)},
        "row 0 begins at position 7; the last row of slot 0 ended at 6",
    ),
    "goes-back": (lambda plan: {"starts": ints(6, 5)}, "row 1 begins at position 5"),
    "released-and-has-a-row": (lambda plan: {"released": (0,)}, "slots 0 have rows, and no sequence was started"),
    "released-twice": (lambda plan: {"released": (0, 0)}, "slot 0 is released, and no sequence is in it"),
    "takes-a-block-of-another-slot": (
        lambda plan: {"new_blocks": ints(0), "new_block_counts": ints(0, 1)},
        "is appended to slot 1, which writes it, and a live slot has it, too",
    ),
    "starts-a-slot-with-rows-in-flight": (
        lambda plan: {"released": (0,), "started": (SlotStart(slot=0, request=request(9), seed=1),)},
        "slot 0 is started while a step in flight has a row of it",
    ),
    "starts-a-busy-slot": (
        lambda plan: {"started": (SlotStart(slot=0, request=request(9), seed=1),)},
        "slot 0 is started, and was not released",
    ),
}


@pytest.mark.parametrize("name", NEXT)
def test_later_plan_that_breaks_the_contract_is_named(name: str) -> None:
    change, message = NEXT[name]
    run = Run(request(0), request(1))
    first = run.step()
    assert 0 in first.new_blocks[: first.new_block_counts[0, 0]]
    plan = run.plan()
    assert plan.starts.tolist() == [6, 6]
    with pytest.raises(BadPlan, match=message):
        run.check.check(dataclasses.replace(plan, **change(plan)))


def test_row_with_a_grammar_waits_for_the_result_before() -> None:
    grammar = Grammar(kind=GrammarKind.REGEX, text="a*")
    run = Run(request(0, grammar=grammar), request(1))
    first = run.step()
    plan = run.plan()
    assert plan.slots.tolist() == [1]
    early = dataclasses.replace(
        plan,
        slots=ints(0, 1),
        starts=ints(6, 6),
        counts=ints(1, 1),
        num_host_tokens=ints(0, 0),
        max_new=ints(1, 1),
        new_block_counts=ints(0, 0),
        new_blocks=ints(),
        void_block_counts=ints(0, 0),
        draft_counts=ints(0, 0),
    )
    with pytest.raises(BadPlan, match="slots 0 have a grammar, and a row while their last token is in flight"):
        run.check.check(early)
    del first


def plan_of(step: int, start: int, count: int, *, drafts: int = 0, **others: Any) -> StepPlan:
    """A row of slot 0 that goes on from its last sampled id, with device drafts."""
    columns = {
        "slots": ints(0),
        "starts": ints(start),
        "counts": ints(count),
        "num_host_tokens": ints(0),
        "max_new": ints(1 + drafts),
        "token_ids": ints(),
        "new_block_counts": ints(0),
        "new_blocks": ints(),
        "draft_counts": ints(drafts),
    }
    return StepPlan(step=step, **{**columns, **others})


def test_rows_after_drafts_begin_at_the_bound_until_the_result_lowers_it() -> None:
    check = PlanCheck(CONFIG, num_token_ids=NUM_TOKEN_IDS)
    first = plan_of(
        0,
        0,
        6,
        num_host_tokens=ints(6),
        token_ids=ints(1, 2, 3, 4, 5, 6),
        new_block_counts=ints(5),
        new_blocks=ints(1, 2, 3, 4, 5),
        started=(SlotStart(slot=0, request=request(0), seed=1),),
    )
    check.check(first)
    drafted = plan_of(1, 6, 4, drafts=3)
    check.check(drafted)
    check.applied(first, StepResult.of_single_tokens(ints(7)))
    bound = plan_of(2, 10, 4, drafts=3)
    check.check(bound)
    # One of three drafts was accepted: two tokens of four.
    check.applied(drafted, StepResult(new_counts=ints(2), token_ids=ints(7, 7)))
    with pytest.raises(BadPlan, match="row 0 begins at position 14; the last row of slot 0 ended at 12"):
        check.check(plan_of(3, 14, 1))
    check.check(plan_of(3, 12, 1))


def test_bound_of_a_slot_that_begins_anew_is_not_lowered_by_its_last_owner() -> None:
    check = PlanCheck(CONFIG, num_token_ids=NUM_TOKEN_IDS)

    def begin(step: int, index: int) -> StepPlan:
        return plan_of(
            step,
            0,
            6,
            num_host_tokens=ints(6),
            token_ids=ints(1, 2, 3, 4, 5, 6),
            new_block_counts=ints(4),
            new_blocks=ints(1, 2, 3, 4),
            started=(SlotStart(slot=0, request=request(index), seed=1),),
            released=(0,) if step else (),
        )

    first, drafted = begin(0, 0), plan_of(1, 6, 4, drafts=3)
    check.check(first)
    check.applied(first, StepResult.of_single_tokens(ints(7)))
    check.check(drafted)
    check.applied(drafted, StepResult(new_counts=ints(0), token_ids=ints(), failed_rows={0: "fault"}))
    again = begin(2, 1)
    check.check(again)
    check.check(plan_of(3, 6, 1))


def test_blocks_of_a_prefix_are_shared_once_their_writer_has_filled_them() -> None:
    check = PlanCheck(CONFIG, num_token_ids=NUM_TOKEN_IDS)
    host = {"num_host_tokens": ints(4), "token_ids": ints(1, 2, 3, 4), "max_new": ints(0)}
    check.check(
        plan_of(
            0,
            0,
            4,
            **host,
            new_block_counts=ints(3),
            new_blocks=ints(1, 2, 3),
            started=(SlotStart(slot=0, request=request(0, prompt=12), seed=1),),
        )
    )

    def share(step: int, *, start: int, blocks: tuple[int, ...]) -> StepPlan:
        return plan_of(
            step,
            start,
            4,
            **host,
            slots=ints(1),
            new_block_counts=ints(len(blocks)),
            new_blocks=ints(*blocks),
            started=(SlotStart(slot=1, request=request(1, prompt=12), seed=1),),
        )

    with pytest.raises(BadPlan, match="block 2 is a prefix of slot 1; slot 0 still fills it"):
        check.check(share(1, start=8, blocks=(1, 2, 9)))
    check = PlanCheck(CONFIG, num_token_ids=NUM_TOKEN_IDS)
    check.check(
        plan_of(
            0,
            0,
            4,
            **host,
            new_block_counts=ints(3),
            new_blocks=ints(1, 2, 3),
            started=(SlotStart(slot=0, request=request(0, prompt=12), seed=1),),
        )
    )
    check.check(share(1, start=4, blocks=(1, 9)))


# --- several block tables -----------------------------------------------------------------------------------


TABLES = SchedulerConfig(
    num_blocks=64,
    block_size_tokens=2,
    max_num_seqs=3,
    max_step_tokens=32,
    max_model_tokens=24,
    max_drafts=3,
    table_windows=(None, 4),
)


class Tables:
    """Plans of several rows, each of one slot, and a check; steps are applied at once."""

    def __init__(self) -> None:
        self.check = PlanCheck(TABLES, num_token_ids=NUM_TOKEN_IDS)
        self.steps = 0

    def plan(self, *rows: "TableRow", released: tuple[int, ...] = ()) -> StepPlan:
        plan = StepPlan(
            step=self.steps,
            slots=ints(*(row.slot for row in rows)),
            starts=ints(*(row.start for row in rows)),
            counts=ints(*(row.end - row.start for row in rows)),
            num_host_tokens=ints(*(0 if row.drafts else row.end - row.start for row in rows)),
            max_new=ints(*(1 + row.drafts for row in rows)),
            draft_counts=ints(*(row.drafts for row in rows)),
            token_ids=ints(*(1 for row in rows if not row.drafts for _ in range(row.start, row.end))),
            new_block_counts=np.array([[len(row.blocks[table]) for row in rows] for table in (0, 1)], np.int32),
            new_blocks=ints(*(block for table in (0, 1) for row in rows for block in row.blocks[table])),
            void_block_counts=np.array([[0 for _ in rows], [row.void for row in rows]], np.int32),
            started=tuple(
                SlotStart(slot=row.slot, request=request(100 * self.steps + row.slot, prompt=20), seed=1)
                for row in rows
                if row.is_started
            ),
            released=released,
        )
        self.steps += 1
        return plan

    def run(self, *rows: "TableRow", released: tuple[int, ...] = ()) -> None:
        plan = self.plan(*rows, released=released)
        self.check.check(plan)
        self.check.applied(plan, StepResult.of_single_tokens(ints(*(7 for _ in rows))))


@dataclasses.dataclass(kw_only=True)
class TableRow:
    start: int
    end: int
    slot: int = 0
    blocks: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    void: int = 0
    drafts: int = 0
    is_started: bool = False


def first_row(end: int, *, slot: int = 0, base: int = 0) -> TableRow:
    """From position 0 on; table 0 has blocks from `base`, table 1 from `base + 20` on."""
    num_blocks = -(-end // 2)
    blocks = tuple(tuple(range(first, first + num_blocks)) for first in (base, base + 20))
    return TableRow(slot=slot, start=0, end=end, blocks=(blocks[0], blocks[1]), is_started=True)


@pytest.mark.parametrize("told", [0, 1, 2])
def test_block_behind_the_window_is_anothers_whether_it_was_told_or_not(told: int) -> None:
    tables = Tables()
    tables.run(first_row(8))
    # Position 8 reads from 5 on: two blocks of table 1 are free.
    tables.run(
        TableRow(start=8, end=9, blocks=((10,), (30,)), void=told),
        TableRow(slot=1, start=0, end=4, blocks=((20, 12), (21, 32)), is_started=True),
    )


@pytest.mark.parametrize("block", [22, 23, 30, 0])
def test_block_that_a_window_shows_or_that_has_none_is_no_others(block: int) -> None:
    tables = Tables()
    tables.run(first_row(8))
    plan = tables.plan(
        TableRow(start=8, end=9, blocks=((10,), (30,)), void=2),
        TableRow(slot=1, start=0, end=2, blocks=((11,), (block,)), is_started=True),
    )
    with pytest.raises(BadPlan, match=f"block {block} is appended to slot"):
        tables.check.check(plan)


def test_block_behind_the_window_may_come_back_as_a_prefix_that_a_tier_has_loaded_into_another_table() -> None:
    tables = Tables()
    tables.run(first_row(8))
    tables.run(
        TableRow(start=8, end=9, blocks=((10,), (30,))),
        TableRow(slot=1, start=2, end=4, blocks=((20, 12), (33, 34)), is_started=True),
    )
    plan = tables.plan(TableRow(slot=2, start=2, end=4, blocks=((23, 13), (35, 36)), is_started=True))
    with pytest.raises(BadPlan, match="block 23 is a prefix of slot 2 in table 0; slot 0 has it in table 1"):
        tables.check.check(plan)


def test_block_behind_the_window_of_a_slot_without_a_row_is_anothers() -> None:
    tables = Tables()
    tables.run(first_row(8), first_row(2, slot=1, base=40))
    tables.run(TableRow(slot=1, start=2, end=4, blocks=((20,), (21,))))
    tables.run(TableRow(start=8, end=9, blocks=((10,), (30,)), void=2))
    with pytest.raises(BadPlan, match="block 20 is appended to slot 0"):
        tables.check.check(tables.plan(TableRow(start=9, end=12, blocks=((20,), (31,)), void=2)))


@pytest.mark.parametrize(
    ("void", "message"),
    [
        (3, "the first 3 blocks of slot 0 are void in table 1; its row reads all after the first 2"),
        (-1, "the first -1 blocks of slot 0 are void in table 1, and 1 were before"),
        (0, "the first 0 blocks of slot 0 are void in table 1, and 1 were before"),
    ],
)
def test_void_counts_that_a_row_cannot_have_are_named(void: int, message: str) -> None:
    tables = Tables()
    tables.run(first_row(6))
    tables.run(TableRow(start=6, end=8, blocks=((10,), (30,)), void=1))
    with pytest.raises(BadPlan, match=message):
        tables.check.check(tables.plan(TableRow(start=8, end=9, blocks=((11,), (31,)), void=void)))


def test_void_counts_of_a_table_without_a_window_are_named() -> None:
    tables = Tables()
    tables.run(first_row(8))
    plan = tables.plan(TableRow(start=8, end=9, blocks=((10,), (30,))))
    plan = dataclasses.replace(plan, void_block_counts=np.array([[1], [0]], np.int32))
    with pytest.raises(BadPlan, match=r"the first 1 blocks of slot 0 are void in table 0; .* all after the first 0"):
        tables.check.check(plan)
    one_table = Run(request(0))
    with pytest.raises(BadPlan, match="void_block_counts is above 0, and no table has a window"):
        one_table.check.check(dataclasses.replace(one_table.plan(), void_block_counts=ints(1)))


@pytest.mark.parametrize("column", ["new_block_counts", "void_block_counts"])
def test_columns_of_tables_have_an_entry_for_each_table_and_row(column: str) -> None:
    tables = Tables()
    plan = dataclasses.replace(tables.plan(first_row(8)), **{column: ints(4)})
    with pytest.raises(BadPlan, match=rf"{column} is of shape \(1, 1\); \[tables, rows\] are \(2, 1\)"):
        tables.check.check(plan)
    with pytest.raises(BadPlan, match=f"{column} must be a two-dimensional array of int32"):
        tables.check.check(dataclasses.replace(plan, **{column: np.zeros((1, 2, 1), np.int32)}))


def test_voids_with_drafts_in_flight_are_as_if_all_were_rejected() -> None:
    for void, is_right in ((2, True), (3, False)):
        tables = Tables()
        row = first_row(8)
        tables.run(row)
        tables.check.check(tables.plan(TableRow(start=8, end=12, drafts=3, blocks=((10, 11), (30, 31)), void=2)))
        # The bound is 12, and at worst the row begins at 9, which reads from 6 on.
        late = tables.plan(TableRow(start=12, end=16, drafts=3, blocks=((12, 13), (32, 33)), void=void + 1))
        if is_right:
            tables.check.check(late)
        else:
            with pytest.raises(BadPlan, match=r"the first 4 blocks of slot 0 are void .* all after the first 3"):
                tables.check.check(late)


def test_table_that_begins_with_void_blocks_goes_on_after_them() -> None:
    tables = Tables()
    tables.run(first_row(8))
    shared = TableRow(slot=1, start=8, end=9, blocks=((0, 1, 2, 3, 10), (22, 23, 30)), void=2, is_started=True)
    tables.run(shared)
    with pytest.raises(BadPlan, match="ends at position 12; its 5 blocks have room for 10"):
        tables.check.check(tables.plan(TableRow(slot=1, start=9, end=12, void=2)))


def test_shared_block_is_of_the_same_table() -> None:
    tables = Tables()
    tables.run(first_row(8))
    swapped = TableRow(slot=1, start=8, end=9, blocks=((0, 1, 2, 3, 10), (22, 2, 30)), void=2, is_started=True)
    with pytest.raises(BadPlan, match="block 2 is a prefix of slot 1 in table 1; slot 0 has it in table 0"):
        tables.check.check(tables.plan(swapped))


def test_one_block_in_two_tables_of_a_row_is_named() -> None:
    tables = Tables()
    row = TableRow(start=0, end=2, blocks=((5,), (5,)), is_started=True)
    with pytest.raises(BadPlan, match="block 5 is appended to slot 0, which writes it"):
        tables.check.check(tables.plan(row))


def test_released_slot_leaves_the_blocks_of_all_its_tables_once() -> None:
    tables = Tables()
    tables.run(first_row(8), first_row(8, slot=1, base=40))
    tables.run(TableRow(slot=1, start=8, end=10, blocks=((10,), (20,)), void=2), released=(0,))
    again = first_row(8, slot=2, base=0)
    again.blocks = (again.blocks[0], (60, 61, 22, 23))  # those that the other slot has are its own now
    tables.run(again)
    tables.run(TableRow(slot=1, start=10, end=11, blocks=((11,), (30,)), void=3))


def test_more_blocks_than_the_longest_context_has_are_named() -> None:
    tables = Tables()
    row = first_row(8)
    row.blocks = (tuple(range(13)), row.blocks[1])
    with pytest.raises(BadPlan, match="slot 0 has 13 blocks in table 0; the longest context has 12"):
        tables.check.check(tables.plan(row))
