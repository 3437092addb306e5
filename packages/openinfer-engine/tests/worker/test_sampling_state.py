"""Sampling batches made from slots."""

import numpy as np

from openinfer_core import GenerateRequest, RequestId, SamplingParams
from openinfer_core.scheduling import SlotStart
from openinfer_engine.worker.sampling_state import SamplingState
from openinfer_kernels import SamplingBatch
from openinfer_kernels.cpu import CpuOps

VOCAB = 12
OPS = CpuOps()


def make(**params: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 8, **params})


def start(
    slot: int, params: SamplingParams, *, prompt: tuple[int, ...] = (3, 4), outputs: tuple[int, ...] = ()
) -> SlotStart:
    request = GenerateRequest(request_id=RequestId(slot), prompt_token_ids=prompt, sampling=params)
    return SlotStart(slot=slot, request=request, seed=2**64 - 1 - slot, output_token_ids=outputs)


def slots(*started: SlotStart) -> SamplingState:
    state = SamplingState(max_num_seqs=4, num_token_ids=10, vocab_size=VOCAB)
    for each in started:
        state.start(each)
    return state


def batch_of(state: SamplingState, rows: list[int], positions: list[int]) -> SamplingBatch:
    return state.batch(np.asarray(rows, np.int32), np.asarray(positions, np.int64), OPS)


def changes_of(batch: SamplingBatch) -> dict[int, dict[int, float]]:
    """Row -> token -> what is added to its logit."""
    bias = batch.bias
    return {
        int(row): dict(zip(ids[:count].tolist(), values[:count].tolist(), strict=True))
        for row, count, ids, values in zip(bias.rows, bias.counts, bias.token_ids, bias.values, strict=True)
    }


def test_batch_takes_each_rows_parameters_from_its_slot() -> None:
    state = slots(start(1, make(temperature=0.5, top_k=5, top_p=0.9, min_p=0.1)), start(3, make(temperature=0.0)))
    batch = batch_of(state, [3, 1], [7, 9])
    assert batch.temperature.tolist() == [0.0, 0.5]
    assert batch.top_k.tolist() == [0, 5]
    assert batch.seeds.tolist() == [2**64 - 4, 2**64 - 2]
    assert batch.positions.tolist() == [7, 9]
    assert batch.num_token_ids == 10
    assert batch.bias is None
    assert batch.penalties is None


def test_top_k_larger_than_int32_vocabulary_is_clipped() -> None:
    assert batch_of(slots(start(0, make(top_k=2**31 - 1))), [0], [2]).top_k.tolist() == [VOCAB]


def test_penalties_count_outputs_before_and_after_a_preemption() -> None:
    state = slots(start(2, make(frequency_penalty=0.5), outputs=(5, 5)), start(0, make()))
    state.count(np.asarray([0, 2], np.int32), np.asarray([1, 6], np.int32))
    state.count(np.asarray([2], np.int32), np.asarray([-1], np.int32))
    penalties = batch_of(state, [0, 2], [2, 5]).penalties
    assert penalties.rows.tolist() == [1]
    assert penalties.output_counts[0].tolist() == [0, 0, 0, 0, 0, 2, 1, 0, 0, 0, 0, 0]
    assert np.flatnonzero(penalties.prompt_seen[0]).tolist() == [3, 4]
    assert penalties.frequency.tolist() == [0.5]


def test_stop_tokens_are_forbidden_until_min_tokens() -> None:
    params = make(min_tokens=2, stop_token_ids=(7, 8, 7), logit_bias={8: 3.0, 1: -1.0})
    state = slots(start(0, params))
    assert changes_of(batch_of(state, [0], [3])) == {0: {1: -1.0, 7: -np.inf, 8: -np.inf}}  # the second output token
    assert changes_of(batch_of(state, [0], [4])) == {0: {8: 3.0, 1: -1.0}}


def test_rows_with_unequal_numbers_of_changes_share_a_batch() -> None:
    state = slots(start(0, make(logit_bias={1: 2.0, 5: 1.0})), start(1, make()), start(2, make(logit_bias={3: -4.0})))
    assert changes_of(batch_of(state, [2, 1, 0], [7, 7, 7])) == {0: {3: -4.0}, 2: {1: 2.0, 5: 1.0}}


def test_a_new_owner_of_a_slot_inherits_nothing() -> None:
    state = slots(start(0, make(frequency_penalty=1.0, min_tokens=3, logprobs=2, prompt_logprobs=1)), start(0, make()))
    batch = batch_of(state, [0], [2])
    assert batch.bias is None
    assert batch.penalties is None
    assert state.logprobs[0] == -1
    assert state.prompt_logprobs[0] == -1
