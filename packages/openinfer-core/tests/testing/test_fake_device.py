"""`FakeDevice` runs rows with drafts of the host and of a device, and refuses rows that contradict them."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from openinfer_core import GenerateRequest, Grammar, GrammarKind, RequestId, SamplingParams
from openinfer_core.scheduling import SchedulerConfig, SlotStart, StepPlan, StepResult
from openinfer_core.testing import ConformanceError, fake_model
from openinfer_core.testing.fake_device import FakeDevice
from openinfer_core.testing.fake_drafter import DraftScript, FakeDrafter
from openinfer_core.testing.fake_grammar import add_script, allowed_by, matcher_of

CONFIG = SchedulerConfig(
    num_blocks=16, block_size_tokens=4, max_num_seqs=2, max_step_tokens=16, max_model_tokens=32, max_drafts=3
)
REQUEST = GenerateRequest(
    request_id=RequestId(0), prompt_token_ids=(5, 6, 7), sampling=SamplingParams(max_tokens=20, logprobs=0)
)
OUTPUTS = fake_model.outcome(REQUEST, max_model_tokens=32).token_ids


def make_device(script: DraftScript = DraftScript.RIGHT) -> FakeDevice:
    return FakeDevice(CONFIG, drafter=FakeDrafter(script, max_drafts=CONFIG.max_drafts))


def make_plan(
    step: int, *, start: int, host_ids: tuple[int, ...] = (), wants: bool = False, **columns: int
) -> StepPlan:
    """One row of slot 0; step 0 starts it with all of its blocks."""
    values = {"drafts": 0, "max_new": 1, "from_device": 0, **columns}

    def column(*items: int) -> Any:
        return np.array(items, np.int32)

    return StepPlan(
        step=step,
        slots=column(0),
        starts=column(start),
        counts=column(values["from_device"] + len(host_ids) + values["drafts"]),
        num_host_tokens=column(len(host_ids)),
        max_new=column(values["max_new"]),
        token_ids=column(*host_ids),
        new_block_counts=column(0 if step else 8),
        new_blocks=column(*(() if step else range(8))),
        started=() if step else (SlotStart(slot=0, request=REQUEST, seed=1),),
        draft_counts=column(values["drafts"]),
        wants_drafts=np.array([wants]),
    )


def begin(device: FakeDevice, *, wants: bool = False) -> StepResult:
    return device.run(make_plan(0, start=0, host_ids=REQUEST.prompt_token_ids, wants=wants))


def test_right_drafts_are_all_accepted_and_one_more_token_is_sampled() -> None:
    device = make_device()
    assert begin(device).tokens_of_rows == [[OUTPUTS[0]]]
    result = device.run(make_plan(1, start=3, from_device=1, drafts=3, max_new=4))
    assert result.tokens_of_rows == [list(OUTPUTS[1:5])]
    assert result.draft_counts.tolist() == [3]
    assert [logprob.rank for logprob in result.logprobs[0]] == [4, 5, 6, 7]


def test_wrong_drafts_leave_one_token_and_the_next_row_begins_at_the_bound_until_that_is_applied() -> None:
    device = make_device(DraftScript.WRONG)
    begin(device)
    assert device.run(make_plan(1, start=3, from_device=1, drafts=3, max_new=4)).tokens_of_rows == [[OUTPUTS[1]]]
    late = make_plan(2, start=7, from_device=1)
    assert device.run(late, num_applied=1).tokens_of_rows == [[OUTPUTS[2]]]
    assert device.run(make_plan(3, start=5, from_device=1)).tokens_of_rows == [[OUTPUTS[3]]]


@pytest.mark.parametrize("start", [4, 6, 8])
def test_row_that_does_not_begin_at_the_bound_is_refused(start: int) -> None:
    device = make_device(DraftScript.WRONG)
    begin(device)
    device.run(make_plan(1, start=3, from_device=1, drafts=3, max_new=4))
    with pytest.raises(ConformanceError, match="its last row ended at 7, drafts in flight included"):
        device.run(make_plan(2, start=start, from_device=1), num_applied=1)


def test_host_drafts_of_a_prompts_last_chunk_are_compared() -> None:
    device = make_device()
    host_ids = (*REQUEST.prompt_token_ids, OUTPUTS[0], OUTPUTS[1], OUTPUTS[2] + 1)
    result = device.run(make_plan(0, start=0, host_ids=host_ids, max_new=4))
    assert result.tokens_of_rows == [list(OUTPUTS[:3])]
    assert result.draft_counts.tolist() == [3]


def test_drafts_go_to_the_host_where_they_are_asked_for() -> None:
    device = make_device()
    assert begin(device, wants=True).next_drafts == {0: OUTPUTS[1:4]}
    result = device.run(make_plan(1, start=3, host_ids=OUTPUTS[1:4], from_device=1, max_new=4))
    assert result.tokens_of_rows == [list(OUTPUTS[1:5])]
    assert result.next_drafts == {}


def test_drafts_that_the_device_does_not_have_are_padding() -> None:
    device = FakeDevice(CONFIG)
    begin(device)
    result = device.run(make_plan(1, start=3, from_device=1, drafts=2, max_new=3))
    assert result.tokens_of_rows == [[OUTPUTS[1]]]
    assert result.draft_counts.tolist() == [0]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"from_device": 1, "drafts": 4, "max_new": 5}, "4 drafts; max_drafts is 3"),
        ({"from_device": 1, "drafts": 2, "max_new": 2}, "2 drafts of the device, and max_new of 2 leaves 1"),
        ({"from_device": 1, "drafts": 1, "max_new": 0}, "1 drafts of the device, and max_new of 0 leaves 0"),
        ({"from_device": 0, "drafts": 2, "max_new": 3}, "all of its positions are drafts"),
        ({"from_device": 1, "drafts": 1, "max_new": 4}, "2 drafts and 0 ids given"),
        ({"from_device": 2, "drafts": 1, "max_new": 2}, "only 4 ids are there"),
    ],
)
def test_row_whose_drafts_contradict_its_other_columns_is_refused(row: dict[str, int], message: str) -> None:
    device = make_device()
    begin(device)
    with pytest.raises(ConformanceError, match=message):
        device.run(make_plan(1, start=3, **row))


def test_kv_of_a_rejected_draft_is_not_that_of_the_prefix() -> None:
    device = make_device(DraftScript.WRONG)
    begin(device)
    device.run(make_plan(1, start=3, from_device=1, drafts=3, max_new=4))
    right = fake_model.states(REQUEST, (*REQUEST.prompt_token_ids, *OUTPUTS[:5]))
    content = (*device.read_block(0), *device.read_block(1))
    assert content[:4] == tuple(right[:4])
    assert all(state not in (None, *right) for state in content[4:7])


@pytest.mark.parametrize("script", DraftScript)
def test_drafters_keep_to_their_script(script: DraftScript) -> None:
    drafter = FakeDrafter(script, max_drafts=3)
    states = fake_model.states(REQUEST, (*REQUEST.prompt_token_ids, *OUTPUTS))
    given = [drafter.draft(REQUEST, states[2 + n], num_outputs=n) for n in range(1, 16)]
    right = [list(OUTPUTS[n : n + 3]) for n in range(1, 16)]
    match script:
        case DraftScript.RIGHT:
            assert given == right
        case DraftScript.WRONG:
            assert all(len(a) == 3 and a[0] != b[0] for a, b in zip(given, right, strict=True))
        case DraftScript.MIX:
            assert {len(drafts) for drafts in given} <= {1, 3}
            assert 0 < sum(drafts[0] == ids[0] for drafts, ids in zip(given, right, strict=True)) < 15
        case DraftScript.HOSTILE:
            assert {0, 6} <= {len(drafts) for drafts in given}
            assert any(not 0 <= token_id < fake_model.NUM_TOKEN_IDS for drafts in given for token_id in drafts)


# several block tables

TABLES = SchedulerConfig(
    num_blocks=16,
    block_size_tokens=2,
    max_num_seqs=2,
    max_step_tokens=16,
    max_model_tokens=32,
    max_drafts=3,
    table_windows=(None, 4),
)
KNOWN = (*REQUEST.prompt_token_ids, *OUTPUTS)


def table_plan(
    step: int, start: int, count: int, *, blocks: tuple[tuple[int, ...], ...], void: int = 0, **columns: Any
) -> StepPlan:
    """A row of slot 0 with ids of the host; it samples only where `max_new` says so."""

    def column(*items: int) -> Any:
        return np.array(items, np.int32)

    return StepPlan(
        step=step,
        slots=column(0),
        starts=column(start),
        counts=column(count + columns.get("drafts", 0)),
        num_host_tokens=column(count),
        max_new=column(columns.get("max_new", 0)),
        token_ids=column(*KNOWN[start : start + count]),
        draft_counts=column(columns.get("drafts", 0)),
        new_block_counts=np.array([[len(each)] for each in blocks], np.int32),
        new_blocks=column(*(block for each in blocks for block in each)),
        void_block_counts=np.array([[0], [void]], np.int32),
        started=columns.get("started", ()),
    )


def start(output_tokens: int = 0) -> tuple[SlotStart, ...]:
    return (SlotStart(slot=0, request=REQUEST, seed=1, output_token_ids=OUTPUTS[:output_tokens]),)


def run_tables(device: FakeDevice, *, void: int, blocks: tuple[tuple[int, ...], ...] = ((4,), (9,))) -> None:
    """Six positions, then the seventh and eighth, which see from position 3 on in table 1."""
    device.run(table_plan(0, 0, 6, blocks=((0, 1, 2), (5, 6, 7)), started=start(8)))
    device.run(table_plan(1, 6, 2, blocks=blocks, void=void))


def test_row_reads_of_a_window_what_it_shows() -> None:
    device = FakeDevice(TABLES)
    device.run(table_plan(0, 0, 6, blocks=((0, 1, 2), (5, 6, 7)), started=start(8)))
    device.write_block(5, (1, 2))  # positions 0 and 1
    device.run(table_plan(1, 6, 2, blocks=((4,), (9,))))
    device.write_block(7, (3, 4))  # positions 4 and 5
    with pytest.raises(ConformanceError, match="row 8:9: position 5 in block 7 of table 1 holds the KV of another"):
        device.run(table_plan(2, 8, 1, blocks=((8,), (10,)), void=2))


@pytest.mark.parametrize("void", [0, 1])
def test_void_blocks_before_what_the_row_reads_are_right(void: int) -> None:
    run_tables(FakeDevice(TABLES), void=void)


@pytest.mark.parametrize("void", [2, 3])
def test_void_blocks_cover_nothing_that_the_row_reads(void: int) -> None:
    message = f"its first {void} blocks of table 1 are void, and it reads that table from position 3 on"
    with pytest.raises(ConformanceError, match=message):
        run_tables(FakeDevice(TABLES), void=void)


def test_void_blocks_are_of_the_row_as_if_drafts_in_flight_were_all_rejected() -> None:
    device = FakeDevice(TABLES, drafter=FakeDrafter(DraftScript.WRONG, max_drafts=3))
    blocks = ((0, 1, 2, 3, 4), (5, 6, 7, 8, 9))
    device.run(table_plan(0, 0, 3, blocks=blocks, max_new=1, started=start()))
    drafted = dataclasses.replace(table_plan(1, 3, 0, blocks=((), ()), max_new=4, drafts=3), counts=np.array([4], "i4"))
    device.run(drafted, num_applied=1)  # one token, at position 4
    late = dataclasses.replace(table_plan(2, 7, 0, blocks=((), ()), max_new=1, void=2), counts=np.array([1], "i4"))
    with pytest.raises(ConformanceError, match="2 blocks of table 1 are void, and it reads that table from position 1"):
        device.run(late, num_applied=1)


def test_void_blocks_stay_void() -> None:
    device = FakeDevice(TABLES)
    run_tables(device, void=1)
    with pytest.raises(ConformanceError, match="table 1: 0 blocks are void, and 1 were before"):
        device.run(table_plan(2, 8, 1, blocks=((8,), (10,)), void=0))


def test_new_blocks_follow_the_void_ones_of_a_table_that_begins_with_some() -> None:
    device = FakeDevice(TABLES)
    run_tables(device, void=1)
    # Another sequence with the same six first tokens, of which table 1 has the last four.
    released = dataclasses.replace(
        table_plan(2, 6, 2, blocks=((0, 1, 2, 11), (6, 7, 12)), void=1, started=start(8)), released=(0,)
    )
    device.run(released)
    with pytest.raises(ConformanceError, match="its 3 blocks have room for 6 tokens in table 1"):
        FakeDevice(TABLES).run(table_plan(0, 6, 2, blocks=((0, 1, 2, 11), (6, 7)), void=1, started=start(8)))


def test_block_of_another_table_is_not_that_of_the_prefix() -> None:
    device = FakeDevice(TABLES)
    run_tables(device, void=1)
    swapped = table_plan(2, 6, 2, blocks=((0, 1, 2, 11), (1, 7, 12)), void=1, started=start(8))
    with pytest.raises(ConformanceError, match="position 3 in block 1 of table 1 holds the KV of table 0"):
        device.run(dataclasses.replace(swapped, released=(0,)))


def test_two_tables_cannot_write_to_one_block() -> None:
    with pytest.raises(ConformanceError, match="row 6:8: tables 0 and 1 have the same block"):
        run_tables(FakeDevice(TABLES), void=1, blocks=((4,), (4,)))


def test_table_without_a_window_has_no_void_blocks() -> None:
    plan = table_plan(0, 0, 6, blocks=((0, 1, 2), (5, 6, 7)), started=start(8))
    wrong = dataclasses.replace(plan, void_block_counts=np.array([[1], [0]], np.int32))
    with pytest.raises(ConformanceError, match="1 blocks of table 0 are void, and it reads that table from position 0"):
        FakeDevice(TABLES).run(wrong)


def test_a_script_is_all_that_its_grammar_lets_the_model_say() -> None:
    script = (70, 3, 2033)
    add_script("a test's tool", script)
    grammar = Grammar(kind=GrammarKind.LARK, text="start: calls of a test's tool")
    sampling = SamplingParams(max_tokens=20, stop_token_ids=(2033,), grammar=grammar)
    request = GenerateRequest(request_id=RequestId(0), prompt_token_ids=(5, 6, 7), sampling=sampling)
    outcome = fake_model.outcome(request, max_model_tokens=32)
    assert (outcome.token_ids, outcome.stop_token_id) == (script[:2], 2033)
    matcher, words = matcher_of(request), np.empty(2048 // 32, np.uint32)
    assert matcher is not None
    for token_id in script:
        matcher.fill(words)
        assert allowed_by(words) == matcher.allowed == 1 << token_id
        matcher.accept(token_id)
    matcher.rollback(2)
    assert matcher.allowed == 1 << script[1]
