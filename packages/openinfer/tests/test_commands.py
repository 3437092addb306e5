"""The command line, in processes of its own where it serves."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest

from openinfer.commands import bench
from openinfer.commands.main import main
from openinfer_core import Refused


@contextmanager
def serving(*flags: str) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    command = [sys.executable, "-m", "openinfer.commands.main", "serve", "--model", "tiny", "--port", "0", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.search(r"http://\S+", line)
            assert found, line
            yield found.group(), process
        finally:
            process.kill()


def test_serve_answers_the_official_client_and_ends_with_zero_on_sigterm() -> None:
    with serving("--queue-policy", "fair-share", "--tenant-weights", "gold=4") as (url, process):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        assert [model.id for model in client.models.list()] == ["tiny"]
        done = client.completions.create(model="tiny", prompt="The capital of France is", max_tokens=24, temperature=0)
        assert "Paris" in done.choices[0].text
        client.close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def test_serve_ends_with_one_when_its_engine_is_killed() -> None:
    with serving() as (_, process):
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        if not children.exists():
            pytest.skip("finding the engine's process needs Linux' /proc/PID/task/PID/children")
        for child in children.read_text().split():
            os.kill(int(child), signal.SIGKILL)
        assert process.wait(30) == 1


def test_generate_prints_the_completion(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--model", "tiny", "The capital of Italy is", "--temperature", "0", "--stop", "."]) == 0
    assert "Rome" in capsys.readouterr().out


def test_demo_prints_paris(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo"]) == 0
    out = capsys.readouterr().out
    assert "Paris" in out
    assert "Tokyo" in out


def test_plan_says_what_serves_and_a_lock_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lock = tmp_path / "plan.json"
    assert main(["plan", "--model", "tiny", "--lock", str(lock), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan == json.loads(lock.read_text())
    assert plan["parts"]["scheduler"].startswith("token-budget (openinfer-engine ")
    assert plan["parts"]["tool_parser"].startswith("hermes (openinfer-server ")
    assert plan["parts"]["reasoning_parser"].startswith("qwen3 (openinfer-server ")
    changed = ["--queue-policy", "priority", "--tool-parser", "none"]
    assert main(["serve", "--model", "tiny", "--locked", str(lock), *changed]) == 2
    said = capsys.readouterr().err
    assert "parts.queue_policy is 'priority" in said
    assert "parts.tool_parser is 'none'" in said
    assert "limits" not in said


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["plan"], "--model is missing"),
        (["plan", "--model", "/nowhere"], "neither a folder nor an installed checkpoint"),
        (["plan", "--model", "tiny", "--family", "gpt2"], "no installed package offers 'gpt2'"),
        (["plan", "--model", "tiny", "--queue-policy", "lifo"], "fair-share, fcfs, priority"),
        (["plan", "--model", "tiny", "--max-num-seqs", "0"], "--max-num-seqs"),
        (["plan", "--model", "tiny", "--max-model-tokens", "999999"], "999999"),
        (
            ["plan", "--model", "tiny", "--tool-parser", "hermse"],
            "deepseek-v3, deepseek-v4, hermes, kimi-k2, ",
        ),
        (["serve", "--model", "tiny", "--reasoning-parser", "mind"], "deepseek, kimi-k2, qwen3"),
        (
            ["serve", "--model", "tiny", "--start-report", "/nowhere/report.json"],
            "--start-report /nowhere/report.json cannot",
        ),
        (["plan", "--model", "tiny", "--lock", "/nowhere/lock.json"], "--lock /nowhere/lock.json cannot be written"),
        (["bench", "nothing"], "frontend"),
    ],
)
def test_what_the_user_can_mend_is_one_line_and_code_two(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said


def test_bench_without_a_benchmark_says_what_to_install() -> None:
    with pytest.raises(Refused, match=r"openinfer-bench has them: `\./run install`"):
        bench.run(["serve"], lister=lambda group: [])


def test_an_unclaimed_model_names_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    assert main(["plan", "--model", str(tmp_path)]) == 2
    assert "no installed family serves model_type 'gpt2'" in capsys.readouterr().err


def test_serve_help_lists_the_familys_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--model", "tiny", "--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    for flag in ("--max-num-seqs", "--drain-deadline-s", "--locked"):
        assert flag in said


def test_commands_of_other_packages_are_found_and_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    assert re.search(r"kernels +of openinfer-kernels ", capsys.readouterr().out)
    assert main(["kernels", "list", "--arch", "sm_90a"]) == 0
    assert "attention_prefill_hopper" in capsys.readouterr().out


def test_output_that_is_read_no_further_ends_the_command_without_a_traceback() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "openinfer.commands.main", "completion", "bash"]
    try:
        done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")
