"""The package's face: names, README, the benchmark command."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import openinfer_engine
from openinfer_core import find_plugin
from openinfer_engine.bench_command import run
from openinfer_engine.offline_bench import run as run_offline


def test_all_is_sorted_and_there() -> None:
    assert list(openinfer_engine.__all__) == sorted(openinfer_engine.__all__)
    assert all(hasattr(openinfer_engine, name) for name in openinfer_engine.__all__)


def test_the_readmes_engine_runs() -> None:
    readme = Path(__file__).parent.parent / "README.md"
    if not readme.exists():
        pytest.skip("the tests run without the checkout around them")
    (block,) = re.findall(r"```python\n(.*?)```", readme.read_text(), re.DOTALL)
    done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.count("[(") == 8


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
