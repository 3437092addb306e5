"""`openinfer bench prompts` runs; the figures are not checked here."""

import json
from pathlib import Path

import pytest

from openinfer.commands.main import main
from openinfer_bench.prompts import conversation, turn


def test_every_arm_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.json"
    few = ["--sessions", "2", "--kilobytes", "20", "--rounds", "1", "--workers", "1", "2"]
    assert main(["bench", "prompts", *few, "--json", str(report)]) == 0
    arms = json.loads(report.read_text())["arms"]
    assert [(arm["arm"], arm["workers"]) for arm in arms] == [
        (name, workers) for workers in (1, 2) for name in ("short", "whole", "known")
    ]
    assert all((arm["turns"], arm["failed"]) == (2, 0) for arm in arms)
    assert all(arm["ttft_p50_ms"] > 0 and arm["gap_max_ms"] > 0 for arm in arms)
    assert "known" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--sessions", "0"),
        ("--rounds", "0"),
        ("--kilobytes", "-5"),
        ("--over-s", "nan"),
        ("--large-workers", "0"),
        ("--json", "/nowhere/at/all.json"),
        ("--model", "/nowhere"),
    ],
)
def test_what_cannot_be_measured_or_written_is_refused_at_once(
    flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "prompts", flag, value]) == 2
    assert flag in capsys.readouterr().err


def test_conversations_have_their_size_and_end_with_the_user() -> None:
    one, other = conversation(0, 50_000), conversation(1, 50_000)
    assert one[0] != other[0]
    assert sum(len(each["content"]) for each in one) >= 50_000
    assert one[-1]["role"] == "user"
    assert [each["role"] for each in turn(one)] == ["assistant", "user"]
