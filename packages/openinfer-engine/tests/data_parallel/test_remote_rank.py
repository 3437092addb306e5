"""Steps of data-parallel ranks that are processes: what goes over the link, and what is wrong on it."""

import threading
from typing import Any

import msgspec
import numpy as np
import pytest

from openinfer_core import TokenLogprobs
from openinfer_core.errors import ContractViolation
from openinfer_core.scheduling import StepPlan, StepResult
from openinfer_engine.data_parallel.remote_rank import DataParallelWorker, RemoteSteps
from openinfer_engine.distributed.expert_group import DataParallelCommunicator
from openinfer_engine.distributed.local_group import LocalGroup
from openinfer_engine.errors import GroupBroken
from openinfer_engine.worker.messages import RunShared, StepDone, from_rank_decoder, to_rank_decoder
from openinfer_engine.worker.runner import DoneStep

RESULT = StepResult(
    new_counts=np.asarray([1, 0, 1], np.int32),
    token_ids=np.asarray([7, 9], np.int32),
    logprobs={0: (TokenLogprobs(-0.5, 1, (7, 3), (-0.5, -1.5)),)},
    prompt_logprobs={2: (TokenLogprobs(-2.0, 4, (), ()),)},
    failed_rows={1: "no token is allowed"},
)


def plan(step: int, **fields: Any) -> StepPlan:
    ones = np.ones(3, np.int32)
    columns = dict.fromkeys(("starts", "counts", "num_host_tokens", "max_new", "new_block_counts"), ones)
    slots = np.arange(3, dtype=np.int32)
    ids = np.asarray([5, 6, 7], np.int32)
    return StepPlan(step=step, slots=slots, token_ids=ids, new_blocks=slots, started=(), **columns, **fields)


def over_the_link(message: Any, decoder: Any) -> Any:
    return decoder.decode(msgspec.msgpack.encode(message))


def test_a_plan_with_its_masks_and_a_result_cross_the_link_unchanged() -> None:
    masks = {(1, 0): np.asarray([3, 1 << 31], np.uint32)}
    order = over_the_link(RunShared.of(plan(4, token_masks=masks), (3, 0), is_decode=True), to_rank_decoder)
    found = order.step_plan()
    assert (order.counts, order.is_decode, found.step) == ([3, 0], True, 4)
    np.testing.assert_array_equal(found.token_ids, [5, 6, 7])
    assert list(found.token_masks) == [(1, 0)]
    np.testing.assert_array_equal(found.token_masks[1, 0], masks[1, 0])
    assert over_the_link(RunShared.of(None, (0, 2), is_decode=False), to_rank_decoder).step_plan() is None
    done = over_the_link(StepDone.of(4, RESULT), from_rank_decoder).result()
    np.testing.assert_array_equal(done.new_counts, RESULT.new_counts)
    assert done.tokens_of_rows == RESULT.tokens_of_rows
    assert (done.logprobs, done.prompt_logprobs) == (RESULT.logprobs, RESULT.prompt_logprobs)
    assert done.failed_rows == RESULT.failed_rows


def test_results_are_those_of_the_steps_that_are_due() -> None:
    told: list[Any] = []
    steps = RemoteSteps(told.append)
    first, without, second = (steps.begin(each, (3, 1), is_decode=False) for each in (plan(1), None, plan(3)))
    assert without.result(0) is None
    assert [each.plan is None for each in told] == [False, True, False]
    steps.hear(StepDone.of(1, RESULT))
    done = first.result(0)
    assert done is not None
    assert done.result().tokens_of_rows == [[7], [], [9]]
    with pytest.raises(ContractViolation, match="a rank has ended step 1, and 3 was due"):
        steps.hear(StepDone.of(1, RESULT))
    assert not second.done()
    with pytest.raises(ContractViolation, match="a rank has ended step 3, and -1 was due"):
        steps.hear(StepDone.of(3, RESULT))


def test_a_rank_that_is_gone_gives_no_result_of_steps_before_or_after() -> None:
    steps = RemoteSteps(lambda _: None)
    before = steps.begin(plan(1), (3, 0), is_decode=False)
    steps.end_all(GroupBroken("rank 1 has died"))
    after = steps.begin(None, (3, 0), is_decode=False)
    for each in (before, after):
        with pytest.raises(GroupBroken, match="rank 1 has died"):
            each.result(0)


class Worker:
    """Notes what it is told; its second result raises."""

    def __init__(self) -> None:
        self.did: list[str] = []

    def launch(self, plan: StepPlan) -> Any:
        self.did.append(f"launch {plan.step}")
        return DoneStep(RESULT) if plan.step == 1 else self

    def result(self) -> StepResult:
        raise MemoryError("no room")

    def join_step(self) -> None:
        self.did.append("join")

    def close(self) -> None:
        self.did.append("close")


def test_a_rank_launches_or_joins_and_answers_in_order_until_a_result_raises() -> None:
    worker, said, failed = Worker(), list[Any](), list[BaseException]()
    communicator = DataParallelCommunicator(LocalGroup(2).communicators[0])
    entered: list[str] = []
    rank: Any = DataParallelWorker(
        worker,  # type: ignore[arg-type]
        communicator,
        answer=said.append,
        fail=failed.append,
        enter_thread=lambda: entered.append(threading.current_thread().name),
    )
    for order in (
        RunShared.of(plan(1), (3, 1), is_decode=False),
        RunShared.of(None, (0, 1), is_decode=True),
        RunShared.of(plan(3), (3, 0), is_decode=False),
    ):
        rank.run(order)
        assert list(communicator.counts) == order.counts
    rank.close()
    assert worker.did == ["launch 1", "join", "launch 3", "close"]
    assert entered == ["openinfer-results"]
    assert [each.step for each in said] == [1]
    assert [str(each) for each in failed] == ["no room"]
