"""The fault boundary of drafters, and what they return made the same on every rank."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from openinfer_core.errors import ContractViolation, Refused
from openinfer_core.scheduling import SlotStart
from openinfer_engine import EngineOptions, LocalGroup, SoloCommunicator
from openinfer_engine.distributed.communicator import Communicator
from openinfer_engine.drafters.contract import DrafterRequirements
from openinfer_engine.drafters.requirements import AskedDrafter
from openinfer_engine.drafting import DrafterFaults, SharedDrafter
from openinfer_engine.options import DeviceKind, LoadFormat
from openinfer_kernels import Array
from openinfer_kv_cache import KvDtype


class _Returning:
    """Returns what it was made with, or raises it."""

    def __init__(self, value: object) -> None:
        self.max_drafts = 3
        self._value = value
        self.calls = 0

    def start(self, starts: Sequence[SlotStart]) -> None:
        del starts

    def draft(self, slots: Array, last_ids: Array, hidden: Array, lengths: Array) -> Array:
        del slots, last_ids, hidden, lengths
        self.calls += 1
        if isinstance(self._value, BaseException):
            raise self._value
        return self._value


def _shared(drafter: _Returning, communicator: Communicator, faults: DrafterFaults) -> SharedDrafter:
    return SharedDrafter(drafter, name="mine (x 1)", communicator=communicator, num_token_ids=10, faults=faults)


def _draft(shared: SharedDrafter) -> Array | None:
    ids = np.zeros(2, np.int32)
    return shared.draft(ids, ids, np.zeros((2, 4), np.float32), ids)


def test_shared_drafter_ends_a_row_at_the_first_id_that_is_none() -> None:
    drafter = _Returning(np.array([[9, 10, 3], [4, -7, 2**31 - 1]], np.int32))

    drafts = _draft(_shared(drafter, SoloCommunicator(), DrafterFaults()))

    assert drafts is not None
    assert drafts.tolist() == [[9, -1, -1], [4, -1, -1]]
    assert drafts.dtype == np.int32


@pytest.mark.parametrize(
    "value",
    [
        RuntimeError("no"),
        SystemExit(0),
        None,
        np.zeros((2, 2), np.int32),
        np.zeros((3, 3), np.int32),
        np.zeros((2, 3), np.int64),
        [[1, 2, 3], [1, 2, 3]],
    ],
    ids=["raises", "exits", "none", "narrow", "long", "int64", "list"],
)
def test_shared_drafter_that_faults_is_counted_named_and_not_called_again(
    value: object, caplog: pytest.LogCaptureFixture
) -> None:
    drafter, faults = _Returning(value), DrafterFaults()
    shared = _shared(drafter, SoloCommunicator(), faults)

    assert _draft(shared) is None
    assert _draft(shared) is None

    assert (drafter.calls, faults.count) == (1, 1)
    assert "drafter mine (x 1) failed" in caplog.text


def test_shared_drafter_gives_all_ranks_the_drafts_of_rank_0() -> None:
    def draft(communicator: Communicator) -> list[list[int]]:
        own = np.full((2, 3), communicator.rank + 4, np.int32)
        drafts = _draft(_shared(_Returning(own), communicator, DrafterFaults()))
        assert drafts is not None
        assert (own == communicator.rank + 4).all()
        return drafts.tolist()

    assert LocalGroup(2).run(draft) == [[[4, 4, 4], [4, 4, 4]]] * 2


def test_shared_drafter_that_faults_among_ranks_ends_the_step() -> None:
    def draft(communicator: Communicator) -> None:
        _draft(_shared(_Returning(RuntimeError("no")), communicator, DrafterFaults()))

    with pytest.raises(ContractViolation, match=r"drafter mine \(x 1\) failed: RuntimeError: no; with several ranks"):
        LocalGroup(2).run(draft)


@pytest.mark.parametrize("is_queued", [True, False])
def test_a_gpu_refuses_drafters_that_read_on_the_host(is_queued: bool) -> None:
    anything: Any = SimpleNamespace(requirements=lambda _: DrafterRequirements(taps=(1,), is_queued=is_queued))
    asked = AskedDrafter(
        name="mine",
        factory=anything,
        definition=anything,
        model_config=None,
        model_dir=Path(),
        drafter_dir=None,
        tensors={},
        max_drafts=2,
        options=EngineOptions(device=DeviceKind.CUDA, load_format=LoadFormat.DUMMY),
        kv_dtype=KvDtype.BFLOAT16,
        state_dtype=KvDtype.BFLOAT16,
    )
    layout: Any = SimpleNamespace(num_ranks=1, num_tables=1, is_dense=True)
    refused = contextlib.nullcontext() if is_queued else pytest.raises(Refused, match=r"drafter mine: .*is_queued")
    with refused:
        asked.check(layout)
