"""The scheduler of `docs/reference/write-a-scheduler.md`, installed as a package, in a real engine and server.

With an order and options of its own, `--kv-tier` and `--kv-events`; its prefixes are found again after a restart.
"""

import contextlib
import random
import re
import subprocess
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import zmq

from openinfer_bench.served import served
from openinfer_core import GenerateRequest, Refused, RequestId, SamplingParams, find_plugin
from openinfer_core.events import Finished, Tokens
from openinfer_engine import EngineOptions, LoadFormat, StepLoop, build_loop, resolve
from openinfer_kv_offload.testing.servers import free_ports

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs" / "reference"
STATES = ROOT / "packages" / "openinfer" / "tests" / "fixtures" / "qwen35"
PROMPT = "A scheduler of another package runs with tiers of ours. " * 8


def code_of(page: str, *, containing: str) -> str:
    text = (DOCS / page).read_text(encoding="utf-8")
    (code,) = [
        each for each in re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE) if containing in each
    ]
    return code


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The page's scheduler in a folder of packages, for this process and those that it starts; its name."""
    folder = tmp_path / "site-packages"
    distribution = folder / "cached_first-1.0.dist-info"
    distribution.mkdir(parents=True)
    (folder / "cached_first.py").write_text(code_of("write-a-scheduler.md", containing="class CachedFirstScheduler"))
    (distribution / "METADATA").write_text("Metadata-Version: 2.1\nName: cached-first\nVersion: 1.0\n")
    (distribution / "entry_points.txt").write_text(
        "[openinfer.schedulers]\ncached-first = cached_first:CachedFirstScheduler\n"
    )
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.delitem(sys.modules, "cached_first", raising=False)
    return "cached-first"


def complete(port: int) -> tuple[str, int]:
    """The text after `PROMPT`, and how many of its tokens were cached."""
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    document = answer.json()
    return document["choices"][0]["text"], document["usage"]["prompt_tokens_details"]["cached_tokens"]


def metrics(port: int) -> str:
    return httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=60).text


def events_told(replay_port: int) -> list[list[Any]]:
    names: dict[str, Any] = {}
    exec(compile(code_of("kv-events.md", containing="def replay"), "kv-events.md", "exec"), names)
    with zmq.Context() as context:
        return names["replay"](context, f"tcp://127.0.0.1:{replay_port}", 0)


def test_a_scheduler_written_from_the_docs_serves_with_tiers_events_and_options_over_a_restart(
    installed: str, tmp_path: Path
) -> None:
    events_port, replay_port = free_ports(2)
    flags = ["--model", "tiny", "--device", "cpu", "--scheduler", installed, "--scheduler-option", "patience=4"]
    flags += ["--kv-tier", f"disk={tmp_path / 'kv'},64MiB", "--kv-events", f"{events_port},replay={replay_port}"]
    with served(flags) as server:
        text, cached = complete(server.port)
        assert cached == 0
        again, cached_in_pool = complete(server.port)
        told = [name for name, *_ in events_told(replay_port)]
    assert again == text
    assert cached_in_pool > 0
    assert told[0] == "AllBlocksCleared"
    assert "BlockStored" in told
    with served(flags) as server:
        assert complete(server.port) == (text, cached_in_pool)
        loaded = re.search(r"^openinfer_kv_tier\S*loaded\S* (\d+)", metrics(server.port), re.MULTILINE)
    assert loaded is not None
    assert int(loaded.group(1)) > 0


def test_an_option_that_it_does_not_know_ends_the_start_with_its_name(installed: str) -> None:
    command = [sys.executable, "-P", "-m", "openinfer.commands.main", "serve", "--model", "tiny", "--port", "0"]
    command += ["--device", "cpu", "--scheduler", installed, "--scheduler-option", "patients=4"]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert ended.returncode != 0
    assert "patients" in ended.stderr
    assert "patience" in ended.stderr


# in this process


@contextlib.contextmanager
def running(model: str, model_dir: Path, **options: Any) -> Generator[StepLoop]:
    definition = find_plugin("openinfer.models", model).load().definition
    limits: dict[str, Any] = {"num_blocks": 24, "max_num_seqs": 4, "max_step_tokens": 64, "max_model_tokens": 320}
    loop = build_loop(resolve(definition, model_dir, EngineOptions(batch_invariant=True, **limits, **options)))
    try:
        yield loop
    finally:
        loop.close()


def serve(loop: StepLoop, prompts: Sequence[Sequence[int]], *, at_once: int) -> dict[int, tuple[list[int], int]]:
    """Tokens and cached tokens of each request; so many are there at a time."""
    said: dict[int, list[int]] = {}
    answers: dict[int, tuple[list[int], int]] = {}
    while len(answers) < len(prompts) or loop.busy:
        while len(said) < len(prompts) and len(said) - len(answers) < at_once:
            index = len(said)
            said[index] = []
            sampling = SamplingParams(max_tokens=6, temperature=0.0)
            request = GenerateRequest(
                request_id=RequestId(index), prompt_token_ids=tuple(prompts[index]), sampling=sampling
            )
            assert loop.submit(request) == []
        for event in loop.step():
            if isinstance(event, Tokens):
                said[int(event.request_id)] += event.token_ids
            elif isinstance(event, Finished):
                answers[int(event.request_id)] = (said[int(event.request_id)], event.cached_tokens)
    return answers


def test_answers_are_those_of_the_default_scheduler_with_tiers_below_a_small_pool(
    installed: str, tmp_path: Path
) -> None:
    draw = random.Random(4)
    threads = [[draw.randrange(256) for _ in range(draw.randint(60, 120))] for _ in range(5)]
    prompts = [(*draw.choice(threads), *(draw.randrange(256) for _ in range(draw.randint(1, 20)))) for _ in range(24)]
    model_dir = find_plugin("openinfer.checkpoints", "tiny").load()()
    with running("qwen3", model_dir) as loop:
        right = serve(loop, prompts, at_once=1)
    tiers = ["host=2MiB", f"disk={tmp_path / 'kv'},64MiB"]
    with running("qwen3", model_dir, scheduler=installed, kv_tier=tiers) as loop:
        answers = serve(loop, prompts, at_once=6)
        stats = loop.stats()
    assert {index: said for index, (said, _) in answers.items()} == {index: said for index, (said, _) in right.items()}
    assert stats.tier_tokens > 0
    assert [tier.tier for tier in stats.kv_tiers] == ["host", "disk"]
    assert stats.blocks_used == 0


def test_a_model_with_recurrent_states_is_served_without_sharing_and_refused_with_tiers(
    installed: str, tmp_path: Path
) -> None:
    prompts = [(*range(1, 70), index) for index in range(3)]
    dummy: dict[str, Any] = {"load_format": LoadFormat.DUMMY}
    with running("qwen35", STATES, **dummy) as loop:
        right = serve(loop, prompts, at_once=1)
    with running("qwen35", STATES, scheduler=installed, **dummy) as loop:
        assert serve(loop, prompts, at_once=1) == {index: (said, 0) for index, (said, _) in right.items()}
    tier = [f"disk={tmp_path / 'kv'},64MiB"]
    with (
        pytest.raises(Refused, match="cached-first plans no copies of them"),
        running("qwen35", STATES, scheduler=installed, kv_tier=tier, **dummy),
    ):
        pass
