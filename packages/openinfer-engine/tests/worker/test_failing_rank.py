"""A rank that fails ends the step of all ranks with its own error; no rank waits for it."""

import numpy as np
import pytest

from openinfer_core import GenerateRequest, RequestId, SamplingParams
from openinfer_core.scheduling import SlotStart, StepPlan
from openinfer_engine.cpu.worker import CpuWorker, WorkerLimits
from openinfer_engine.distributed.communicator import Communicator
from openinfer_engine.distributed.local_group import LocalGroup
from openinfer_engine.model import KvLayers
from openinfer_engine.worker.paged_tensors import KvPool
from openinfer_engine.worker.runner import ThreadRunner
from openinfer_kernels import Array, AttentionBatch
from openinfer_kernels.cpu import CpuOps

LIMITS = WorkerLimits(max_num_seqs=2, max_model_tokens=16, block_size_tokens=4, num_token_ids=8, vocab_size=8)


class SummingModel:
    """Sums over the ranks in every forward pass; one of them fails when it sees the token 7."""

    def __init__(self, communicator: Communicator, failing_rank: int) -> None:
        self._communicator = communicator
        self._fails = communicator.rank == failing_rank

    def forward(self, token_ids: Array, *, batch: AttentionBatch, kv_cache: KvLayers) -> Array:
        if self._fails and (token_ids == 7).any():
            raise ZeroDivisionError("token 7")
        return self._communicator.all_reduce(np.ones((len(token_ids), 1), np.float32))

    def logits(self, hidden: Array) -> Array:
        return np.repeat(hidden, LIMITS.vocab_size, axis=1)


def make_runner(size: int, failing_rank: int) -> ThreadRunner:
    ops = CpuOps()
    return ThreadRunner(
        [
            CpuWorker(
                SummingModel(communicator, failing_rank),
                kv_pool=KvPool(blocks=ops.zeros((1,)), layers={}),
                ops=ops,
                communicator=communicator,
                limits=LIMITS,
            )
            for communicator in LocalGroup(size).communicators
        ]
    )


def plan(token_id: int) -> StepPlan:
    request = GenerateRequest(
        request_id=RequestId(0), prompt_token_ids=(token_id,), sampling=SamplingParams(max_tokens=1, temperature=0)
    )
    one = np.ones(1, np.int32)
    return StepPlan(
        step=0,
        slots=0 * one,
        starts=0 * one,
        counts=one,
        num_host_tokens=one,
        max_new=np.ones(1, np.int32),
        token_ids=token_id * one,
        new_block_counts=one,
        new_blocks=one,
        started=(SlotStart(slot=0, request=request, seed=0),),
    )


@pytest.mark.parametrize(("size", "failing_rank"), [(1, 0), (2, 0), (2, 1), (4, 2)])
def test_failing_rank_ends_the_step_with_its_own_error(size: int, failing_rank: int) -> None:
    runner = make_runner(size, failing_rank)
    assert runner.launch(plan(3)).result().token_ids.tolist() == [0]
    pending = [runner.launch(plan(7)), runner.launch(plan(3))]
    with pytest.raises(ZeroDivisionError, match="token 7"):
        pending[0].result()
    runner.close()
