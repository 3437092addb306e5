"""`simulate fit --offline`: coefficients come back from figures that they made, and a file is what was measured."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from openinfer.commands.main import main
from openinfer_bench.simulate.latency import EngineLimits, FitOrigin, Line, Shape, StepLatency, shape_of
from openinfer_bench.simulate.latency_fit import BYTES_PER_S, OfflineResult, OfflineRow, fit_steps, steps_of
from openinfer_bench.simulate.replay.fitted import read_fitted, read_frontend
from openinfer_core import InvalidRequest

LIMITS = EngineLimits(
    max_model_tokens=4096, num_blocks=8192, block_size_tokens=16, max_num_seqs=64, max_step_tokens=2048
)
TRUE = StepLatency(
    decode=Line((1, 8, 64), (2.0e-3, 2.2e-3, 3.5e-3)),
    mixed=Line((16, 256, 1024, 2048), (2.5e-3, 5e-3, 15e-3, 29e-3)),
    context_token_s=40e-9,
    longest_token_s=15e-9,
    pair_s=0.9e-9,
    chunk_s=30e-6,
)
SIZES = [(1, 16), (1, 256), (1, 1024), (1, 2048), (8, 64), (8, 512), (64, 16), (64, 256), (2, 1024), (1, 3072)]


def measured(batch: int, prompt_tokens: int) -> OfflineRow:
    """What `bench offline` would see of `TRUE`."""
    row = OfflineRow(batch=batch, prompt_tokens=prompt_tokens, output_tokens=33, prefill_s=0.0, tpot_ms=0.0, steps=32)
    prefill, decode = steps_of(row, LIMITS)
    return msgspec.structs.replace(
        row,
        prefill_s=sum(map(TRUE.of_shape, prefill)),
        tpot_ms=1e3 * sum(map(TRUE.of_shape, decode)) / len(decode),
    )


def result_of(rows: list[OfflineRow]) -> OfflineResult:
    origin = FitOrigin(file="synthetic", commit="none")
    return OfflineResult(origin=origin, limits=LIMITS, kv_bytes_per_token=30e-9 * BYTES_PER_S, rows=rows)


def test_a_fit_recovers_the_coefficients_that_made_the_figures() -> None:
    found, rows = fit_steps([result_of([measured(*size) for size in SIZES])])
    for name in ("context_token_s", "longest_token_s", "pair_s", "chunk_s"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=0.02), name
    for size in (1, 8, 64):
        assert found.decode.at(size) == pytest.approx(TRUE.decode.at(size), rel=0.01), size
    for size in (16, 256, 1024, 2048):
        assert found.mixed.at(size) == pytest.approx(TRUE.mixed.at(size), rel=0.01), size
    assert all(row.fitted_s == pytest.approx(row.measured_s, rel=0.002) for row in rows)


def test_steps_are_those_that_the_scheduler_plans() -> None:
    row = OfflineRow(batch=8, prompt_tokens=512, output_tokens=9, prefill_s=0.0, tpot_ms=0.0, steps=8)
    prefill, decode = steps_of(row, LIMITS)
    # four prompts; three and the most of the eighth beside four decode rows; the rest of it beside seven
    assert [(shape.num_tokens, shape.chunks) for shape in prefill] == [(2048, 4), (2048, 4), (16, 1)]
    assert [shape.num_tokens for shape in decode] == [8] * 8
    contexts = [shape.context_tokens for shape in decode]
    assert contexts == [8 * 512 + 4 * 3 + 3 * 2 + 1 + 8 * step for step in range(8)]


def test_a_token_of_context_costs_no_less_than_its_bytes() -> None:
    dear = OfflineResult(
        origin=FitOrigin(file="synthetic", commit="none"),
        limits=LIMITS,
        kv_bytes_per_token=50e-9 * BYTES_PER_S,
        rows=[measured(*size) for size in SIZES],
    )
    found, _ = fit_steps([dear])
    assert found.context_token_s == pytest.approx(50e-9, rel=0.01)


def test_a_shape_says_what_a_step_reads() -> None:
    assert shape_of([100, 40], [1, 1]) == Shape(2, True, 142, 101, 0, 0)
    # 3 decode rows would be padded to 4; with a chunk of 20 tokens the step has 23, which is padded to 32
    assert shape_of([9, 9, 9], [1, 1, 1]).num_tokens == 4
    mixed = shape_of([9, 9, 9, 64], [1, 1, 1, 20])
    assert mixed == Shape(32, False, 30 + 84, 84, 64 * 20 + 210, 1)
    # beyond what is captured, products have whole tiles of 128 tokens
    assert [shape_of([0, 9], [count, 1]).num_tokens for count in (511, 512, 1023, 1024)] == [512, 640, 1024, 1152]
    # queries of a long chunk read keys together: what counts is pairs
    assert shape_of([0], [1024]) == Shape(1024, False, 0, 0, 1024 * 1025 // 2, 1)


def test_a_line_is_straight_between_its_points_and_beyond_the_last() -> None:
    line = Line((1, 3, 5), (1.0, 2.0, 4.0))
    assert [line.at(size) for size in (0, 1, 2, 3, 4, 5, 7)] == [1.0, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    with pytest.raises(ValueError, match="ascend"):
        Line((3, 1), (1.0, 2.0))


def report_of(rows: list[OfflineRow]) -> dict[str, Any]:
    tokens = LIMITS.num_blocks * LIMITS.block_size_tokens
    limits = {**msgspec.to_builtins(LIMITS), "kv_cache_tokens": tokens}
    model = {"limits": limits, "memory_bytes": {"kv_cache": round(30e-9 * BYTES_PER_S * tokens)}}
    return {"commit": "abc", "gpu": "G", "set_up": {"model": model}, "rows": msgspec.to_builtins(rows)}


def frontend_report(wake_s: float, token_s: float) -> dict[str, Any]:
    rows = [
        {"streams": streams, "server_cpu_s_per_100k": 1e5 * (token_s + wake_s / streams), "lag_p50_ms": 0.2}
        for streams in (8, 64, 256)
    ]
    return {"commit": "def", "date": "today", "rows": rows}


def test_the_command_writes_what_it_was_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    offline, frontend, host = (tmp_path / name for name in ("offline", "frontend", "host"))
    offline.write_text(json.dumps(report_of([measured(*size) for size in SIZES])))
    frontend.write_text(json.dumps(frontend_report(40e-6, 7e-6)))
    fit = tmp_path / "fit.json"
    names = ("request_s", "prompt_token_s", "decoded_byte_s", "sliced_byte_s", "taken_token_s", "cold_token_s")
    times = dict.fromkeys((*names, "cached_token_s", "plan_s", "planned_row_s"), 1e-6)
    host.write_text(json.dumps({"machine": "M", "commit": "ghi", "times": times}))
    options = ["--offline", str(offline), "--frontend", str(frontend), "--host", str(host), "--output", str(fit)]
    assert main(["simulate", "fit", *options]) == 0
    assert "1 x 1024: prefill" in capsys.readouterr().out
    found = read_fitted(fit)
    assert [origin.commit for origin in found.origins] == ["abc", "def"]
    assert found.limits == LIMITS
    assert found.streaming.wake_s == pytest.approx(40e-6)
    assert found.streaming.streamed_token_s == pytest.approx(7e-6)
    assert found.streaming.link_s == pytest.approx(0.2e-3 - 40e-6 - 4 * 7e-6)
    assert found.host.times.request_s == 1e-6


@pytest.mark.parametrize("text", ["", "{}", '{"rows": []}', "[1]"])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other"
    path.write_text(text)
    with pytest.raises(InvalidRequest, match="no result of"):
        read_frontend(path)
    assert main(["simulate", "fit", "--offline", str(path), "--frontend", str(path), "--output", str(path)]) != 0
