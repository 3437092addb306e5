"""The drafter is found by its name, drafts what followed, and changes no answer of the toy model."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from openinfer_core import GenerateRequest, RequestId, SamplingParams
from openinfer_core.plugins import DRAFTERS, find_plugin
from openinfer_core.scheduling import SlotStart
from openinfer_engine import DrafterContext, EngineOptions, SoloCommunicator, build_loop, resolve
from openinfer_engine.testing import check_model_drafter, run_at_once
from openinfer_kernels.cpu import CpuOps
from openinfer_lookup import LookupDrafter
from openinfer_qwen3.family import Qwen3Definition
from openinfer_tiny_model import model_dir


def make_drafter() -> LookupDrafter:
    model: Any = SimpleNamespace()
    return LookupDrafter(
        DrafterContext(
            model_dir=Path(),
            config={},
            model=model,
            ops=CpuOps(),
            communicator=SoloCommunicator(),
            max_num_seqs=3,
            max_model_tokens=100,
            num_token_ids=50,
            max_drafts=4,
        )
    )


def start(drafter: LookupDrafter, slot: int, prompt: list[int], *, outputs: tuple[int, ...] = ()) -> None:
    request = GenerateRequest(
        request_id=RequestId(slot), prompt_token_ids=tuple(prompt), sampling=SamplingParams(max_tokens=9)
    )
    drafter.start([SlotStart(slot=slot, request=request, seed=0, output_token_ids=outputs)])


def draft(drafter: LookupDrafter, *rows: tuple[int, int, int]) -> list[list[int]]:
    """Of rows of slot, last id and length."""
    slots, last_ids, lengths = np.asarray(rows, np.int32).T
    drafts = drafter.draft(slots, last_ids, np.zeros((len(rows), 8), np.float32), lengths)
    assert drafts.dtype == np.int32
    return drafts.tolist()


def test_what_followed_the_last_two_tokens_latest_is_drafted() -> None:
    drafter = make_drafter()
    start(drafter, 1, [1, 2, 3, 4, 1, 2, 5, 6, 1])
    start(drafter, 2, [7, 8, 9])
    assert draft(drafter, (1, 2, 10), (2, 7, 4)) == [[5, 6, 1, 2], [-1] * 4]


def test_accepted_drafts_are_part_of_the_sequence_and_refused_ones_are_not() -> None:
    drafter = make_drafter()
    start(drafter, 0, [1, 2, 3, 4, 5, 6, 1])
    assert draft(drafter, (0, 2, 8)) == [[3, 4, 5, 6]]
    assert draft(drafter, (0, 9, 11)) == [[-1] * 4]  # 3 and 4 were accepted, then came 9
    assert draft(drafter, (0, 3, 12)) == [[-1] * 4]
    assert draft(drafter, (0, 4, 13)) == [[9, 3, 4, -1]]  # what followed 3 and 4 lately, not in the prompt


def test_a_preempted_sequence_and_the_next_one_of_a_slot_begin_with_what_they_have() -> None:
    drafter = make_drafter()
    start(drafter, 0, [1, 2, 3], outputs=(4, 1))
    assert draft(drafter, (0, 2, 6)) == [[3, 4, 1, 2]]
    start(drafter, 0, [5, 6])
    assert draft(drafter, (0, 2, 3)) == [[-1] * 4]


def make_requests() -> list[GenerateRequest]:
    """Prompts that repeat themselves."""
    return [
        GenerateRequest(
            request_id=RequestId(index),
            prompt_token_ids=tuple([*range(index + 3, index + 12)] * 4),
            sampling=SamplingParams(max_tokens=24, temperature=0.7 * (index % 2), seed=index, logprobs=1),
        )
        for index in range(6)
    ]


@pytest.mark.parametrize("ranks", [1, 2])
def test_answers_of_the_toy_model_are_those_without(ranks: int) -> None:
    stats = check_model_drafter(
        Qwen3Definition(), model_dir(), LookupDrafter, requests=make_requests(), tensor_parallel_size=ranks
    )
    assert stats.spec_decode_num_accepted_tokens > 0


def test_it_is_found_by_its_name_and_drafts_for_an_engine() -> None:
    assert find_plugin(DRAFTERS, "lookup").load() is LookupDrafter
    options = EngineOptions(num_blocks=64, max_num_seqs=4, speculative="lookup,k=3,adaptive=false")
    loop = build_loop(resolve(Qwen3Definition(), model_dir(), options))
    try:
        assert loop.info.composition["drafter"].startswith("lookup (openinfer-lookup 0.1")
        assert len(run_at_once(loop, make_requests())) == len(make_requests())
        assert loop.stats().spec_decode_num_draft_tokens > 0
    finally:
        loop.close()
