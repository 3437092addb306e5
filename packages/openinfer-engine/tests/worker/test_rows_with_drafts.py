"""Rows of several tokens on the CPU's worker: what is accepted, what fails, and what a drafter may do wrong."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from openinfer_core import GenerateRequest, RequestId, SamplingParams
from openinfer_core.errors import ContractViolation
from openinfer_core.scheduling import SlotStart, StepPlan, StepResult
from openinfer_engine import LocalGroup, SoloCommunicator
from openinfer_engine.cpu.worker import NOT_FINITE, CpuWorker, WorkerLimits
from openinfer_engine.distributed.communicator import Communicator
from openinfer_engine.drafting import DrafterFaults, SharedDrafter
from openinfer_engine.model import KvLayers
from openinfer_engine.worker.paged_tensors import KvPool
from openinfer_engine.worker.runner import ThreadRunner
from openinfer_kernels import Array, AttentionBatch
from openinfer_kernels.cpu import CpuOps

VOCAB = 20
AFTER_THIS_NOTHING = 13
LIMITS = WorkerLimits(max_num_seqs=3, max_model_tokens=32, block_size_tokens=4, num_token_ids=VOCAB, vocab_size=VOCAB)


class CountingModel:
    """Says the number after the last, and no number at all after 13."""

    def __init__(self) -> None:
        self.positions: list[list[int]] = []

    def forward(self, token_ids: Array, *, batch: AttentionBatch, kv_cache: KvLayers) -> Array:
        del kv_cache
        self.positions.append(batch.positions.tolist())
        return np.asarray(token_ids, np.float32)[:, None]

    def logits(self, hidden: Array) -> Array:
        logits = -np.abs(np.arange(VOCAB) - (hidden + 1)).astype(np.float32)
        logits[hidden[:, 0] == AFTER_THIS_NOTHING] = np.nan
        return logits


class CountingDrafter:
    """Drafts the numbers after the last, up to `max_drafts`; raises when it sees the number it is made with."""

    max_drafts = 3

    def __init__(self, raises_at: int = -1) -> None:
        self.told: list[tuple[list[int], ...]] = []
        self._raises_at = raises_at

    def start(self, starts: Sequence[SlotStart]) -> None:
        del starts

    def draft(self, slots: Array, last_ids: Array, hidden: Array, lengths: Array) -> Array:
        self.told.append((slots.tolist(), last_ids.tolist(), hidden[:, 0].tolist(), lengths.tolist()))
        if self._raises_at in last_ids:
            raise RuntimeError("out of ideas")
        return (last_ids[:, None] + np.arange(1, 4)).astype(np.int32)


def make_worker(
    drafter: CountingDrafter | None = None,
    *,
    communicator: Communicator | None = None,
    model: CountingModel | None = None,
    faults: DrafterFaults | None = None,
) -> CpuWorker:
    ops, group = CpuOps(), communicator or SoloCommunicator()
    shared = None
    if drafter is not None:
        shared = SharedDrafter(
            drafter, name="counting", communicator=group, num_token_ids=VOCAB, faults=faults or DrafterFaults()
        )
    return CpuWorker(
        model or CountingModel(),
        kv_pool=KvPool(blocks=ops.zeros((1,)), layers={}),
        ops=ops,
        communicator=group,
        limits=LIMITS,
        drafter=shared,
    )


def started(slot: int, *, logprobs: int | None = None) -> SlotStart:
    sampling = SamplingParams(max_tokens=20, temperature=0, logprobs=logprobs)
    request = GenerateRequest(request_id=RequestId(slot), prompt_token_ids=(1,), sampling=sampling)
    return SlotStart(slot=slot, request=request, seed=0)


def plan(
    rows: Sequence[tuple[int, int, Sequence[int], int, int]], starts: Sequence[SlotStart] = (), **others: Any
) -> StepPlan:
    """Rows of (slot, start, host ids, device drafts, max_new); those of slots that do not start begin with a last id.

    All blocks that a sequence may need come with its start.
    """
    new = {each.slot for each in starts}
    num_blocks = [8 if slot in new else 0 for slot, *_ in rows]
    fields: dict[str, Any] = {
        "step": 0,
        "slots": [slot for slot, *_ in rows],
        "starts": [start for _, start, *_ in rows],
        "counts": [len(ids) + drafts + (slot not in new) for slot, _, ids, drafts, _ in rows],
        "num_host_tokens": [len(ids) for _, _, ids, _, _ in rows],
        "max_new": [max_new for *_, max_new in rows],
        "draft_counts": [drafts for *_, drafts, _ in rows],
        "token_ids": [token for _, _, ids, _, _ in rows for token in ids],
        "new_block_counts": num_blocks,
        "new_blocks": list(range(sum(num_blocks))),
    }
    columns = {name: np.asarray(value, np.int32) for name, value in fields.items() if name != "step"}
    return StepPlan(step=0, started=tuple(starts), **columns, **others)


def run(worker: CpuWorker, step: StepPlan) -> StepResult:
    return worker.launch(step).result()


def test_step_of_no_rows_yields_nothing_and_changes_nothing() -> None:
    drafter = CountingDrafter()
    worker = make_worker(drafter)
    run(worker, plan([(0, 0, [1, 2, 9, 9], 0, 4)], [started(0)]))
    told = len(drafter.told)

    result = run(worker, plan([]))

    assert [len(each) for each in (result.new_counts, result.token_ids, result.draft_counts)] == [0, 0, 0]
    assert result.new_counts.dtype == result.token_ids.dtype == np.int32
    assert len(drafter.told) == told
    assert run(worker, plan([(0, 4, [], 2, 3)])).tokens_of_rows == [[4, 5, 6]]


def test_row_yields_tokens_up_to_the_first_that_is_no_draft() -> None:
    worker = make_worker()
    step = plan([(0, 0, [1, 2, 3, 4], 0, 4), (1, 0, [1, 2, 9, 4], 0, 4), (2, 0, [5], 0, 1)], [*map(started, range(3))])

    result = run(worker, step)

    assert result.tokens_of_rows == [[2, 3, 4, 5], [2, 3], [6]]
    assert result.new_counts.tolist() == [4, 2, 1]
    assert result.draft_counts.tolist() == [3, 3, 0]


def test_rows_planned_for_upper_bounds_are_computed_where_their_sequence_is() -> None:
    model = CountingModel()
    worker = make_worker(model=model)
    run(worker, plan([(0, 0, [1, 2, 9, 9], 0, 4)], [started(0)]))

    result = run(worker, plan([(0, 4, [], 0, 1)]))

    assert model.positions == [[0, 1, 2, 3], [2]]
    assert result.tokens_of_rows == [[4]]


def test_drafts_beyond_what_the_device_has_are_padding() -> None:
    without, worker = make_worker(), make_worker(CountingDrafter())
    for each in (without, worker):
        run(each, plan([(0, 0, [1], 0, 1)], [started(0)]))

    missing, found = (run(each, plan([(0, 1, [], 5, 6)])) for each in (without, worker))

    assert (missing.tokens_of_rows, missing.draft_counts.tolist()) == ([[3]], [0])
    assert (found.tokens_of_rows, found.draft_counts.tolist()) == ([[3, 4, 5, 6]], [3])


def test_drafter_is_told_last_ids_lengths_and_what_predicted_them() -> None:
    drafter = CountingDrafter()
    worker = make_worker(drafter)
    run(worker, plan([(2, 0, [1, 2, 3, 9], 0, 3), (0, 0, [4, 5], 0, 0)], [started(2), started(0)]))
    run(worker, plan([(2, 5, [], 2, 3)]))

    assert drafter.told == [([2], [4], [3], [4]), ([2], [7], [6], [7])]


def test_next_drafts_come_back_for_rows_that_want_them() -> None:
    worker = make_worker(CountingDrafter())
    step = plan(
        [(0, 0, [1], 0, 1), (1, 0, [17], 0, 1), (2, 0, [1, 2], 0, 0)],
        [*map(started, range(3))],
        wants_drafts=np.array([False, True, True]),
    )

    assert run(worker, step).next_drafts == {1: (19,)}, "18 was sampled, and there is no token 20"


def test_row_without_a_finite_logit_fails_as_a_whole_and_others_live() -> None:
    worker = make_worker(CountingDrafter())
    first = [started(0, logprobs=0), started(1, logprobs=0)]

    result = run(worker, plan([(0, 0, [11, 12, 13, 14], 0, 4), (1, 0, [1, 2], 0, 2)], first))

    assert result.failed_rows == {0: NOT_FINITE}
    assert result.tokens_of_rows == [[], [2, 3]]
    assert [len(each) for each in result.logprobs.values()] == [2]
    assert run(worker, plan([(0, 4, [], 3, 4), (1, 2, [], 3, 4)])).tokens_of_rows[1] == [4, 5, 6, 7]


def test_drafter_that_raises_is_counted_and_decoding_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    faults = DrafterFaults()
    worker = make_worker(CountingDrafter(raises_at=6), faults=faults)
    run(worker, plan([(0, 0, [1], 0, 1)], [started(0)]))

    results = [run(worker, plan([(0, start, [], 3, 4)])) for start in (1, 5, 9)]

    assert [result.tokens_of_rows[0] for result in results] == [[3, 4, 5, 6], [7], [8]]
    assert [result.draft_counts[0] for result in results] == [3, 0, 0]
    assert faults.count == 1
    assert "drafter counting failed: RuntimeError: out of ideas; decoding goes on without drafts" in caplog.text


def test_drafter_that_raises_on_one_rank_ends_the_step_of_all() -> None:
    workers = [
        make_worker(CountingDrafter(raises_at=2 if communicator.rank == 1 else -1), communicator=communicator)
        for communicator in LocalGroup(2).communicators
    ]
    runner = ThreadRunner(workers)

    with pytest.raises(ContractViolation, match=r"drafter counting failed: RuntimeError: out of ideas; with several"):
        runner.launch(plan([(0, 0, [1], 0, 1)], [started(0)])).result()
    runner.close()


@pytest.mark.parametrize(
    "row",
    [
        (0, 1, [], 0, 1),  # before the end of its sequence
        (1, 3, [], 0, 1),  # no row of its slot has sampled
        (0, 6, [], 2, 2),  # a device draft that is no sampled position's
        (0, 6, [], 0, 2),  # more sampled positions than ids
    ],
)
def test_row_that_contradicts_its_slot_is_refused(row: tuple[int, int, list[int], int, int]) -> None:
    worker = make_worker()
    run(worker, plan([(0, 0, [1, 2, 3], 0, 3), (1, 0, [1, 2, 3], 0, 0)], [started(0), started(1)]))

    with pytest.raises(ContractViolation, match="row 0 is planned with"):
        run(worker, plan([row]))
