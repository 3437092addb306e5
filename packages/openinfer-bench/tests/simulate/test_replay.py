"""`simulate replay`: workloads and arrival traces through the whole stack, with fitted times."""

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from openinfer.commands.main import main
from openinfer_bench.simulate.latency import EngineLimits, Line, StepLatency
from openinfer_bench.simulate.replay.arrivals import phase_of_file, read_arrivals
from openinfer_bench.simulate.replay.command import replay
from openinfer_bench.simulate.replay.comparison import MeasuredRow, compare, table
from openinfer_bench.simulate.replay.fitted import FittedServer, MeasuredHost, StreamingTimes
from openinfer_bench.simulate.replay.host_times import HostTimes
from openinfer_core import InvalidRequest

DECODE_S, MIXED_S, CONTEXT_S = 4e-3, 10e-3, 1e-6


@pytest.fixture
def fit(tmp_path: Path) -> Path:
    """Times that can be added up: 4 ms a decode step, 10 ms one with prompts, 1 µs a token of context."""
    fitted = FittedServer(
        commit="none",
        origins=[],
        limits=EngineLimits(
            max_model_tokens=1024, num_blocks=512, block_size_tokens=16, max_num_seqs=8, max_step_tokens=256
        ),
        steps=StepLatency(
            decode=Line((1,), (DECODE_S,)),
            mixed=Line((1,), (MIXED_S,)),
            context_token_s=CONTEXT_S,
            longest_token_s=0.0,
            pair_s=0.0,
            chunk_s=0.0,
        ),
        streaming=StreamingTimes(wake_s=20e-6, streamed_token_s=10e-6, link_s=100e-6),
        host=MeasuredHost(
            machine="none",
            commit="none",
            times=HostTimes(
                request_s=1e-3,
                prompt_token_s=0.0,
                decoded_byte_s=0.0,
                sliced_byte_s=0.0,
                taken_token_s=0.0,
                cold_token_s=0.0,
                cached_token_s=0.0,
                plan_s=0.0,
                planned_row_s=0.0,
            ),
        ),
        rows=[],
    )
    path = tmp_path / "fit.json"
    path.write_bytes(msgspec.json.encode(fitted))
    return path


def sizes(**changes: Any) -> dict[str, Any]:
    given = {"prompt_tokens": 200, "output_tokens": 16, "seconds": 2.0, "num_token_ids": 2000, "seed": 1}
    return given | changes


def test_one_request_at_a_time_takes_the_time_of_its_steps(fit: Path) -> None:
    options = {"fit": str(fit), "workload": "bs1", "sizes": sizes()}
    report = replay(0, options)
    (row,) = report["rows"]
    assert (row["ok"], row["failed"], row["errors"]) == (8, 0, [])
    # a request, a step with its prompt, the frame and half of its token; the network, twice
    ttft_ms = 1e3 * (1e-3 + MIXED_S + 100e-6 + 20e-6 + 5e-6 + 2 * 20e-6)
    assert row["ttft_ms"]["p50"] == pytest.approx(ttft_ms, abs=0.04)
    mean_context = 200 + 8.5
    assert row["tpot_ms"]["p50"] == pytest.approx(1e3 * (DECODE_S + mean_context * CONTEXT_S), rel=0.01)
    assert report == replay(0, options)


def test_a_workload_is_compared_with_what_was_measured(
    fit: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    percentiles = {"p50": 11.1, "p90": 11.2, "p99": 11.3, "mean": 11.1}
    row: dict[str, Any] = {
        "workload": "bs1",
        "ok": 8,
        "out_tok_s": 1.0,
        "ttft_ms": percentiles,
        "tpot_ms": {**percentiles, "p50": 4.2},
        "itl_ms": percentiles,
        "prompt_tokens": 200,
        "output_tokens": 16,
        "seed": 3,
    }
    warm = {**row, "tpot_ms": None, "itl_ms": None, "output_tokens": 1, "ok": 10}
    rows = [row, {**warm, "workload": "cold=200"}, {**warm, "workload": "warm=200"}]
    measured, report = tmp_path / "serve.json", tmp_path / "report.json"
    measured.write_text(json.dumps({"commit": "abc", "set_up": sizes(), "rows": rows}))
    command = ["simulate", "replay", "--fit", str(fit), "--measured", str(measured), "--json", str(report)]
    assert main(command) == 1  # 1 token/s is none that is replayed
    output = capsys.readouterr().out
    assert "4 of 5 figures within their bounds" in output
    assert "miss (bound 10%)" in output
    written = json.loads(report.read_text())
    figures = {(each["workload"], each["figure"]): each for each in written["compared"]}
    assert figures["bs1 200/16", "TTFT p50 ms"]["passed"]
    assert figures["bs1 200/16", "TPOT p50 ms"]["passed"]
    assert not figures["bs1 200/16", "tokens/s"]["passed"]
    assert figures["warm=200 200/1", "TTFT p50 ms"]["passed"]
    warm_row = written["runs"][1]["rows"][1]
    assert warm_row["cached_tokens"] == 10 * 192


def test_p99_is_compared_where_there_are_requests_for_it() -> None:
    levels = {"p50": 100.0, "p90": 100.0, "p99": 100.0, "mean": 100.0}
    measured = MeasuredRow(
        workload="qps=9",
        ok=20,
        out_tok_s=100.0,
        ttft_ms=levels,
        tpot_ms=levels,
        itl_ms=levels,
        prompt_tokens=1,
        output_tokens=2,
    )
    replayed = {name: {**levels, "p50": 111.0, "p99": 124.0} for name in ("ttft_ms", "tpot_ms", "itl_ms")}
    found = compare(measured, {**replayed, "out_tok_s": 91.0})
    passed = {each.figure: each.passed for each in found}
    assert passed == {
        "TTFT p50 ms": False,
        "TTFT p99 ms": True,
        "TPOT p50 ms": False,
        "ITL p99 ms": True,
        "tokens/s": True,
    }
    assert "3 of 5 figures" in table(found)
    few = compare(msgspec.structs.replace(measured, ok=19), {**replayed, "out_tok_s": 91.0})
    assert not [each for each in few if "p99" in each.figure]


# --- arrival traces -----------------------------------------------------------------------------------------

MOONCAKE = """\
{"timestamp": 5000, "input_length": 1100, "output_length": 7, "hash_ids": [4, 9, 12]}
{"timestamp": 2000, "input_length": 600, "output_length": 2, "hash_ids": [4, 5]}
"""
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:48.1805900,396,109
"""


def test_mooncakes_requests_share_their_blocks(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(MOONCAKE)
    phase = phase_of_file(path)
    first, second = phase.jobs
    assert [(job.at_s, len(job.prompt_ids), job.output_tokens) for job in phase.jobs] == [(0.0, 600, 2), (3.0, 1100, 7)]
    assert first.prompt_ids[:512] == second.prompt_ids[:512]
    assert not np.array_equal(first.prompt_ids[512:600], second.prompt_ids[512:600])
    assert len(phase_of_file(path, most_requests=1).jobs) == 1


def test_azures_requests_come_at_their_times(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(AZURE)
    jobs = phase_of_file(path).jobs
    assert [(len(job.prompt_ids), job.output_tokens) for job in jobs] == [(374, 44), (396, 109)]
    assert jobs[1].at_s == pytest.approx(1.5)


def test_a_step_trace_has_arrivals_too(tmp_path: Path) -> None:
    path = tmp_path / "steps"
    config = {"num_blocks": 8, "block_size_tokens": 4, "max_num_seqs": 2, "max_step_tokens": 8, "max_model_tokens": 16}
    lines = [
        {"record": "begin", "scheduler": "token-budget", "queue_policy": "fcfs", "config": config},
        {"record": "add", "at_s": 7.0, "request": 1, "prompt_tokens": 9, "max_tokens": 50},
        {"record": "add", "at_s": 7.5, "request": 2, "prompt_tokens": 5, "max_tokens": 50},
        {"record": "add", "at_s": 7.75, "request": 3, "prompt_tokens": 5, "max_tokens": 50, "refusal": "overloaded"},
        {"record": "content", "request": 3, "num_tokens": 5, "blocks": [0], "end": "overloaded"},
        {"record": "content", "request": 2, "num_tokens": 8, "blocks": [0, 3], "end": "stop"},
        {"record": "content", "request": 1, "num_tokens": 12, "blocks": [0, 1, 2], "end": "length"},
    ]
    path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    first, second = phase_of_file(path).jobs
    assert [(job.at_s, len(job.prompt_ids), job.output_tokens) for job in (first, second)] == [(0, 9, 3), (0.5, 5, 3)]
    assert first.prompt_ids[:4] == second.prompt_ids[:4]
    assert first.prompt_ids[4] != second.prompt_ids[4]


def test_an_arrival_trace_is_replayed(fit: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(AZURE)
    assert main(["simulate", "replay", "--fit", str(fit), "--arrivals", str(path)]) == 0
    report = json.loads(capsys.readouterr().out)
    (row,) = report["rows"]
    assert (row["ok"], report["engine"]["prompt_tokens"]) == (2, 770)
    assert report["virtual_s"] > 1.5


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", '{"timestamp": 1}\n', "TIMESTAMP,ContextTokens\nx,1\n"])
def test_other_files_are_no_arrivals(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other"
    path.write_text(text)
    with pytest.raises(InvalidRequest, match=r"arrival trace|no request"):
        phase_of_file(path)
    with pytest.raises(InvalidRequest, match="arrival trace"):
        read_arrivals(tmp_path / "missing")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "give one of --measured, --arrivals and --steps"),
        (["--steps", "x", "--arrivals", "y"], "give one of"),
        (["--measured", "x"], "--measured needs --fit"),
    ],
)
def test_a_replay_needs_one_thing_to_replay(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "replay", *options]) != 0
    assert said in capsys.readouterr().err
