"""`openinfer bench scheduler`, `offline`, `grammars` and `trace`."""

import json
from pathlib import Path
from typing import Any

import pytest

from openinfer_bench import grammars
from openinfer_bench.offline import run as run_offline
from openinfer_bench.scheduler import run
from openinfer_bench.trace import run as run_trace
from openinfer_bench.trace import summarise, summarise_file
from openinfer_core import (
    Finished,
    FinishReason,
    GenerateRequest,
    InvalidRequest,
    RequestId,
    SamplingParams,
    find_plugin,
)
from openinfer_engine.tracing.trace import DEVICE, Span, Trace


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def make_request(request_id: int, *, prompt: tuple[int, ...] = (1, 2, 3), max_tokens: int = 4) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return GenerateRequest(request_id=RequestId(request_id), prompt_token_ids=prompt, sampling=sampling)


def test_bench_scheduler_prints_and_writes_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.json"
    assert run(["--rows", "4", "--steps", "5", "--json", str(report)]) == 0
    said = capsys.readouterr().out
    assert "us per block" in said
    written = json.loads(report.read_text())
    assert [row["rows"] for row in written["scheduler"]] == [4]
    assert written["bookkeeping_us_per_block"] > 0


def test_bench_offline_times_steps_in_which_every_row_decodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.json"
    model_dir = find_plugin("openinfer.checkpoints", "tiny").load()()
    argv = ["--model", str(model_dir), "--size", "3x20", "--output", "5"]
    argv += ["--option", "num_blocks=64", "--option", "max_step_tokens=8", "--option", "max_num_seqs=4"]
    assert run_offline([*argv, "--commit", "abc", "--json", str(report)]) == 0
    assert "3 x 20" in capsys.readouterr().out
    written = json.loads(report.read_text())
    (row,) = written["rows"]
    assert (row["batch"], row["prompt_tokens"], written["commit"]) == (3, 20, "abc")
    assert row["tpot_ms"] > 0
    assert row["steps"] == 4
    assert row["prefill_tokens_per_s"] == pytest.approx(60 / row["prefill_s"])


def test_bench_prints_a_row_for_each_grammar(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "grammars.json"
    assert grammars.run(["--tokens", "5", "--json", str(file)]) == 0
    table = capsys.readouterr().out
    rows = json.loads(file.read_text())["rows"]
    assert [row["grammar"] for row in rows] == list(grammars.GRAMMARS)
    assert all(name in table for name in grammars.GRAMMARS)
    assert all(row["tokens"] >= 5 and row["first_ms"] > 0 for row in rows)


def test_gaps_count_only_while_a_request_is_open(tmp_path: Path) -> None:
    clock = Clock()
    trace = Trace(tmp_path / "trace.json", clock=clock)
    for request_id, begin_s, end_s in ((0, 0.0, 4.0), (1, 8.0, 12.0)):
        clock.now_s = begin_s
        trace.submitted(make_request(request_id))
        clock.now_s = end_s
        trace.told([Finished(RequestId(request_id), FinishReason.LENGTH, 3, 2, 0)])
    for begin_s, end_s in ((1.0, 2.0), (2.0, 3.0), (3.5, 4.0), (9.0, 10.0)):
        trace.add(Span(DEVICE, "step", begin_s, end_s, {}))
    summary = summarise(trace.events())
    assert summary.steps == 4
    assert summary.gaps_us == (0.0, 5e5, 0.0)  # no request was open between the third step and the fourth
    assert summary.busy_share == pytest.approx(3.5 / 4.0)
    assert "4 steps" in summary.table()


def test_the_summary_of_an_empty_run_and_of_no_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.json"
    Trace(path).close()
    assert run_trace([str(path)]) == 0
    assert "0 steps" in capsys.readouterr().out
    path.write_text("{}")
    with pytest.raises(InvalidRequest, match="is no trace"):
        run_trace([str(path)])


def test_the_summary_of_an_engine_that_wrote_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.json"
    model_dir = find_plugin("openinfer.checkpoints", "tiny").load()()
    argv = ["--model", str(model_dir), "--size", "3x20", "--output", "5", "--trace", str(path)]
    assert run_offline([*argv, "--option", "num_blocks=64", "--option", "max_num_seqs=4"]) == 0
    summary = summarise_file(path)
    assert 0.2 < summary.busy_share <= 1
    assert summary.table() in capsys.readouterr().out
