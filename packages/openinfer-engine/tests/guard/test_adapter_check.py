"""Plans that would run a row with another adapter than its own."""

from typing import Any

import numpy as np
import pytest

from openinfer_core import GenerateRequest, RequestId, SamplingParams
from openinfer_core.request import LoadedAdapter
from openinfer_core.scheduling import AdapterLoad, SlotStart, StepPlan
from openinfer_engine.guard.adapter_check import AdapterCheck
from openinfer_engine.guard.errors import BadPlan

ONE, OTHER = b"1" * 16, b"2" * 16


def start(slot: int, digest: bytes | None, adapter_slot: int = 0) -> SlotStart:
    request = GenerateRequest(
        request_id=RequestId(slot),
        prompt_token_ids=(1,),
        sampling=SamplingParams(max_tokens=1),
        adapter=None if digest is None else LoadedAdapter(digest, adapter_slot),
    )
    return SlotStart(slot=slot, request=request, seed=0)


def plan(**fields: Any) -> StepPlan:
    empty = np.zeros(0, np.int32)
    names = ("slots", "starts", "counts", "num_host_tokens", "max_new", "token_ids", "new_block_counts", "new_blocks")
    return StepPlan(step=0, **dict.fromkeys(names, empty), **fields)


def load(slot: int, digest: bytes) -> tuple[AdapterLoad, ...]:
    return (AdapterLoad(slot=slot, digest=digest),)


def test_adapter_that_lies_in_its_slot_is_fine_until_another_one_does() -> None:
    check = AdapterCheck(2)
    check.check(plan(adapter_loads=load(0, ONE), started=(start(0, ONE), start(1, None))))
    check.check(plan(adapter_loads=load(1, OTHER), started=(start(2, OTHER, 1), start(3, ONE))))
    check.check(plan(released=(0, 3)))
    check.check(plan(adapter_loads=load(0, OTHER), started=(start(0, OTHER),)))
    with pytest.raises(BadPlan, match="in which its adapter does not lie"):
        check.check(plan(started=(start(3, ONE),)))


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"adapter_loads": load(2, ONE)}, "adapter slots are 0 .. 1"),
        ({"adapter_loads": load(-1, ONE)}, "adapter slots are 0 .. 1"),
        ({"adapter_loads": load(0, OTHER)}, "still runs with"),
        ({"started": (start(1, OTHER),)}, "does not lie"),
        ({"started": (start(1, ONE, 1),)}, "does not lie"),
        ({"started": (start(1, ONE, -1),)}, "does not lie"),
    ],
)
def test_wrong_adapters_are_named(fields: dict[str, Any], why: str) -> None:
    check = AdapterCheck(2)
    check.check(plan(adapter_loads=load(0, ONE), started=(start(0, ONE),)))
    with pytest.raises(BadPlan) as problem:
        check.check(plan(**fields))
    assert why in str(problem.value)
