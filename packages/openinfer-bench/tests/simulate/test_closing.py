"""Tiers end in the time that there is, in virtual time: what is slow takes as long as it is said to, on any machine."""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from openinfer_core.testing.simulation.child import run_in_child
from openinfer_engine.kv_tiers.port import CLOSE_S

HERE = Path(__file__).parent
_MORE_S = 0.05  # threads that go one after the other


def ended(monkeypatch: pytest.MonkeyPatch, function: str, **arguments: Any) -> dict[str, Any]:
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    with tempfile.TemporaryDirectory() as folder:
        with run_in_child(f"closing:{function}", seed=1, arguments=arguments, folder=Path(folder)) as process:
            output, _ = process.communicate()
        assert process.returncode == 0, output
    return json.loads(output.splitlines()[-1])


def test_a_stack_on_a_slow_disk_ends_in_time_and_keeps_what_was_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = ended(monkeypatch, "stack_on_a_slow_disk")
    assert answer.pop("took_s") <= 4.0 + _MORE_S
    assert answer == {
        "have_ended": False,  # a thread of the disk is in an operation of 30 s
        "load": "partial",
        "touched": False,
        "saved_before": 2,
        "stored_below": True,
    }


def test_an_engine_ends_without_a_plug_in_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = ended(monkeypatch, "port_with_a_hanging_plug_in")
    assert answer.pop("took_s") <= CLOSE_S + _MORE_S
    assert answer == {"calls": ["memory is unlocked"], "faults": 0}


@pytest.mark.parametrize("function", ["stack_on_a_slow_disk", "port_with_a_hanging_plug_in"])
def test_tiers_that_end_in_their_own_time_are_found(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ended(monkeypatch, function, mutant="tiers_end_in_their_own_time")["took_s"] > 9.0
