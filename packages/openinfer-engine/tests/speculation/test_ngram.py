"""The n-gram drafter by itself: slots, predictions, options. What a whole engine answers is tested by families."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from openinfer_core import GenerateRequest, RequestId, SamplingParams
from openinfer_core.errors import Refused
from openinfer_core.scheduling import SlotStart
from openinfer_engine import DrafterContext, SoloCommunicator
from openinfer_engine.speculation.ngram import NgramDrafter
from openinfer_kernels.cpu import CpuOps

EMPTY: Any = SimpleNamespace()


def make_drafter(*, max_model_tokens: int = 100, ops: Any = None, **options: str) -> NgramDrafter:
    context = DrafterContext(
        model_dir=Path(),
        config={},
        model=EMPTY,
        ops=ops or CpuOps(),
        communicator=SoloCommunicator(),
        max_num_seqs=3,
        max_model_tokens=max_model_tokens,
        num_token_ids=50,
        max_drafts=4,
        options=options,
    )
    return NgramDrafter(context)


def start(drafter: NgramDrafter, prompt: Sequence[int], *, outputs: Sequence[int] = (), **fields: Any) -> None:
    request = GenerateRequest(
        request_id=RequestId(1), prompt_token_ids=tuple(prompt), sampling=SamplingParams(max_tokens=9), **fields
    )
    drafter.start([SlotStart(slot=1, request=request, seed=0, output_token_ids=tuple(outputs))])


def draft(drafter: NgramDrafter, last_id: int, length: int) -> list[int]:
    columns = [np.asarray([each], np.int32) for each in (1, last_id, length)]
    drafts = drafter.draft(columns[0], columns[1], np.zeros((1, 8), np.float32), columns[2])
    assert drafts.dtype == np.int32
    return drafts[0].tolist()


def test_drafts_follow_a_sequence_through_acceptance_preemption_and_the_next_request() -> None:
    drafter = make_drafter()
    start(drafter, [1, 2, 3, 4, 5, 6, 1])
    assert draft(drafter, 2, 8) == [3, 4, 5, 6]
    assert draft(drafter, 9, 11) == [-1] * 4  # 3 and 4 were accepted, then came 9
    assert draft(drafter, 1, 12) == [-1] * 4
    assert draft(drafter, 2, 13) == [3, 4, 5, 6]
    start(drafter, [1, 2, 3, 4, 5, 6, 1], outputs=[2, 3, 4, 9, 1, 2])
    assert draft(drafter, 3, 14) == [4, 5, 6, 1]
    start(drafter, [7, 7])
    assert draft(drafter, 1, 3) == [-1] * 4


def test_a_prediction_is_drafted_from_its_beginning_and_found_again() -> None:
    drafter = make_drafter()
    start(drafter, [8, 9], prediction_token_ids=(1, 2, 3, 4, 5, 6, 7))
    assert draft(drafter, 1, 3) == [2, 3, 4, 5]
    assert draft(drafter, 20, 5) == [-1] * 4  # 2 was accepted, then came another token
    assert draft(drafter, 4, 6) == [-1] * 4
    assert draft(drafter, 5, 7) == [6, 7, -1, -1]


def test_a_prediction_longer_than_the_context_is_looked_up_as_far_as_there_is_room() -> None:
    drafter = make_drafter(max_model_tokens=10)
    start(drafter, [8, 9], prediction_token_ids=tuple(range(1, 40)))
    assert draft(drafter, 1, 3) == [2, 3, 4, 5]
    assert draft(drafter, 8, 10) == [-1] * 4  # the context ends here


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"n_max": "0"}, "n_max is 0; it must be between 1 and 63"),
        ({"n_max": "64"}, "n_max is 64"),
        ({"n_min": "5"}, "n_min is 5; it must be between 1 and 4"),
        ({"n_min": "x"}, "n_min is x"),
        ({"match": "best"}, "match is 'best'; possible are earliest, latest"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, str], says: str) -> None:
    with pytest.raises(Refused, match=f"--speculative: {says}"):
        make_drafter(**options)


def test_options_choose_what_matches() -> None:
    prompt = [1, 2, 3, 4, 2, 5, 1]
    earliest, latest, longer = make_drafter(n_min="1"), make_drafter(n_min="1", match="latest"), make_drafter(n_max="1")
    for drafter in (earliest, latest, longer):
        start(drafter, prompt)
    assert draft(earliest, 2, 8) == [3, 4, 2, 5]
    assert draft(longer, 2, 8) == [3, 4, 2, 5]
    assert draft(latest, 2, 8) == [3, 4, 2, 5]
    start(latest, [2, 3, 2, 4])
    assert draft(latest, 2, 5) == [4, 2, 4, 2]


class CountingOps(CpuOps):
    """Notes the bytes of what is uploaded."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def upload(self, host: Any) -> Any:
        self.num_bytes += host.nbytes
        return super().upload(host)


@pytest.mark.parametrize("max_model_tokens", [100, 40_000])
def test_the_ledger_has_what_a_history_takes(max_model_tokens: int) -> None:
    ops = CountingOps()
    make_drafter(max_model_tokens=max_model_tokens, ops=ops)

    assert ops.num_bytes == 3 * NgramDrafter.bytes_per_sequence(max_model_tokens, 4)
