"""Steps on their way to other processes."""

import dataclasses
import os
from dataclasses import fields

import msgspec
import numpy as np
import pytest

from openinfer_core import GenerateRequest, RequestId, SamplingParams
from openinfer_core.errors import ContractViolation
from openinfer_core.scheduling import SlotStart, StateCopy, StepPlan
from openinfer_engine.worker.messages import Agree, Leave, RunStep, bodies, send, to_rank_decoder

NOT_SENT = {"token_masks", "wants_drafts", "released"}
"""Rank 0 samples."""


def make_plan() -> StepPlan:
    request = GenerateRequest(
        request_id=RequestId(2**40),
        prompt_token_ids=tuple(range(300)),
        sampling=SamplingParams(max_tokens=5, temperature=0.5, logit_bias={3: -1.0}, stop_token_ids=(7,)),
        cache_salt="salt",
    )
    return StepPlan(
        step=7,
        slots=np.array([3, 0], np.int32),
        starts=np.array([0, 41], np.int32),
        counts=np.array([16, 1], np.int32),
        num_host_tokens=np.array([16, 0], np.int32),
        max_new=np.array([0, 1], np.int32),
        token_ids=np.arange(16, dtype=np.int32),
        new_block_counts=np.array([[1, 0], [2, 0], [0, 1]], np.int32),
        new_blocks=np.array([9, 4, 5, 1], np.int32),
        void_block_counts=np.array([[0, 0], [0, 3], [2, 0]], np.int32),
        started=(SlotStart(slot=3, request=request, seed=2**63, output_token_ids=(1, 2)),),
        state_restores=(StateCopy(source=5, target=3), StateCopy(source=6, target=1, loaded_tokens=32)),
        state_snapshots=(StateCopy(source=3, target=6), StateCopy(source=0, target=7)),
        token_masks={(1, 0): np.ones(4, np.uint32)},
    )


def test_a_step_arrives_as_it_was_sent_but_for_its_masks() -> None:
    reader, writer = os.pipe()
    plan = make_plan()
    for message in (Agree(12, b"ticket"), RunStep.of(plan), Leave()):
        send(writer, message)
    os.close(writer)
    agree, step, leave = map(to_rank_decoder.decode, bodies(reader))
    os.close(reader)
    assert agree == Agree(12, b"ticket")
    assert leave == Leave()
    assert isinstance(step, RunStep)
    arrived = step.plan()
    for field in fields(StepPlan):
        sent, found = getattr(plan, field.name), getattr(arrived, field.name)
        if field.name in NOT_SENT:
            assert not np.any(found)
        elif isinstance(sent, np.ndarray):
            assert found.dtype == sent.dtype
            assert np.array_equal(found, sent)
        else:
            assert found == sent


def test_a_step_of_no_rows_arrives() -> None:
    none = np.zeros(0, np.int32)
    columns = ("slots", "starts", "counts", "num_host_tokens", "max_new", "token_ids", "new_block_counts", "new_blocks")
    sent = StepPlan(step=7, **dict.fromkeys(columns, none))
    message = to_rank_decoder.decode(msgspec.msgpack.encode(RunStep.of(sent)))
    assert isinstance(message, RunStep)
    found = message.plan()
    assert (found.step, found.num_rows, found.num_tokens) == (7, 0, 0)
    for name in (*columns, "draft_counts", "void_block_counts"):
        assert getattr(found, name).dtype == np.int32
        assert getattr(found, name).size == 0


def test_tables_without_void_blocks_arrive() -> None:
    sent = dataclasses.replace(make_plan(), void_block_counts=np.zeros((3, 2), np.int32))
    message = RunStep.of(sent)
    assert message.void_block_counts == b""
    assert message.plan().void_block_counts.tolist() == [[0, 0]] * 3


def test_every_field_of_a_plan_has_its_place_in_the_message() -> None:
    assert set(RunStep.__struct_fields__) == {field.name for field in fields(StepPlan)} - NOT_SENT


def test_a_pipe_that_ends_within_a_message_is_an_error() -> None:
    reader, writer = os.pipe()
    os.write(writer, b"\x10\0\0\0abc")
    os.close(writer)
    with pytest.raises(ContractViolation, match="ended within a message"):
        list(bodies(reader))
    os.close(reader)
