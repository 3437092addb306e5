"""`openinfer bench frontend` runs, whatever it asks for; the figures are not checked here."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from openinfer.commands.main import main
from openinfer_bench.frontend.answers import ANSWERS, Answer


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=lambda answer: answer.name)
def test_requests_are_whole(answer: Answer) -> None:
    head, _, body = answer.request(7).partition(b"\r\n\r\n")
    assert head.startswith(f"POST {answer.path} HTTP/1.1\r\n".encode())
    assert f"content-length: {len(body)}".encode() in head
    assert json.loads(body)["max_tokens"] == 7


@pytest.mark.skipif(
    not sys.platform.startswith("linux") or shutil.which("cc") is None, reason="its floor and client need Linux and cc"
)
def test_every_kind_of_answer_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.json"
    names = ["content", "reasoning", "arguments"]
    few = ["--streams", "2", "--rate", "400", "--seconds", "0.2", "--repeats", "1", "--answers", *names]
    duties = ["--with", "keys", "traces", "metrics"]
    assert main(["bench", "frontend", *few, *duties, "--json", str(report)]) == 0
    told = json.loads(report.read_text())
    assert told["set_up"]["with"] == ["keys", "traces", "metrics"]
    rows = told["rows"]
    assert [row["answer"] for row in rows] == names
    for row in rows:
        (sample,) = row["server_samples"]
        assert 70 <= sample["tokens"] <= 80  # the first token of an answer may be a tag, or lose its space to one
    table = capsys.readouterr().out
    assert all(name in table for name in names)
