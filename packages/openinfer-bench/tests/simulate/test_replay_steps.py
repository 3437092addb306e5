"""A step trace of an engine is repeated exactly; a step that is another one is named."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from openinfer.commands.main import main
from openinfer_bench.simulate.latency import Line, StepLatency
from openinfer_bench.simulate.replay.step_times import compare_step_times
from openinfer_bench.simulate.replay.steps import replay_steps
from openinfer_core import (
    EngineInfo,
    GenerateRequest,
    InvalidRequest,
    RequestId,
    SamplingParams,
    TokenEvent,
    Tokens,
    find_plugin,
)
from openinfer_core.plugins import QUEUE_POLICIES, SCHEDULERS
from openinfer_core.scheduling import QueuePolicyConfig, SchedulerConfig, StepPlan
from openinfer_core.testing import fake_model
from openinfer_core.testing.fake_device import FakeDevice
from openinfer_engine.loop import StepLoop
from openinfer_engine.tracing.step_trace import Begin, StepTrace
from openinfer_engine.worker.runner import DoneStep

# So few blocks that sequences give way.
CONFIG = SchedulerConfig(
    num_blocks=28, block_size_tokens=4, max_num_seqs=6, max_step_tokens=32, max_model_tokens=96, max_itl_ms=20
)


class Runner:
    """Computes steps on a `FakeDevice` when they are launched."""

    failure = None

    def __init__(self) -> None:
        self._device = FakeDevice(CONFIG)

    def launch(self, plan: StepPlan) -> DoneStep:
        return DoneStep(self._device.run(plan, num_applied=max(0, plan.step - 1)))

    def close(self) -> None:
        pass


def make_loop(path: Path, policy: str) -> StepLoop:
    now_s = 0.0

    def clock() -> float:
        nonlocal now_s
        now_s += 0.003
        return now_s

    made: Any = find_plugin(SCHEDULERS, "token-budget").make(
        CONFIG, find_plugin(QUEUE_POLICIES, policy).make(QueuePolicyConfig(tenant_weights={"a": 3.0}))
    )
    info = EngineInfo(
        model="fake",
        family="fake",
        max_model_tokens=CONFIG.max_model_tokens,
        num_token_ids=2048,
        eos_token_ids=(),
        block_size_tokens=CONFIG.block_size_tokens,
        num_blocks=CONFIG.num_blocks,
        max_num_seqs=CONFIG.max_num_seqs,
        max_waiting=64,
    )
    begin = Begin(scheduler="token-budget", queue_policy=policy, config=CONFIG, tenant_weights={"a": 3.0})
    return StepLoop(info=info, scheduler=made, runner=Runner(), step_trace=StepTrace(path, begin), clock=clock)


def conversations(draw: random.Random) -> Iterator[GenerateRequest]:
    """Turns that begin with those before them, what the model said among it; some stop early, some have a salt."""
    told: list[tuple[int, ...]] = [(1, 2, 3, 4, 5, 6, 7, 8, 9)]
    for number in range(1, 60):
        prompt = (*draw.choice(told), *draw.choices(range(1, 64), k=draw.randint(1, 12)))[:60]
        sampling = SamplingParams(
            max_tokens=draw.randint(1, 30),
            temperature=0.0,
            stop_token_ids=tuple(draw.sample(range(fake_model.NUM_TOKEN_IDS), draw.choice((0, 4)))),
            prompt_logprobs=draw.choice((None, None, None, 0)),
        )
        request = GenerateRequest(
            request_id=RequestId(number),
            prompt_token_ids=prompt,
            sampling=sampling,
            tenant=draw.choice("ab"),
            cache_salt=draw.choice((None, None, "s")),
        )
        answer = fake_model.outcome(request, max_model_tokens=CONFIG.max_model_tokens)
        told.append((*prompt, *answer.token_ids)[:50])
        yield request


def record(path: Path, *, seed: int = 1, policy: str = "fair-share") -> tuple[StepLoop, int]:
    """The loop that ran, and how many tokens it told."""
    draw, loop = random.Random(seed), make_loop(path, policy)
    events: list[TokenEvent] = []
    for request in conversations(draw):
        loop.submit(request)
        for _ in range(draw.randint(0, 6)):
            events += loop.step()
        if draw.random() < 0.1:
            loop.abort(RequestId(max(1, request.request_id - draw.randint(0, 5))))
    while loop.busy:
        events += loop.step()
    loop.close()
    return loop, sum(len(event.token_ids) for event in events if isinstance(event, Tokens))


@pytest.mark.parametrize("policy", ["fair-share", "fcfs"])
def test_a_run_is_repeated_exactly(tmp_path: Path, policy: str) -> None:
    loop, num_tokens = record(tmp_path / "steps", policy=policy)
    stats = loop.stats()
    assert stats.preemptions > 5
    assert stats.cached_tokens > 100
    replayed = replay_steps(tmp_path / "steps")
    assert replayed.difference is None, replayed
    assert (replayed.steps, replayed.requests) == (stats.steps, 59)
    assert replayed.tokens == num_tokens > 500
    assert replay_steps(tmp_path / "steps") == replayed


def changed(path: Path, change: Any, kind: str, index: int) -> tuple[Path, Any]:
    """A copy of a trace, one record of a kind changed; and that record as it was."""
    lines = path.read_bytes().splitlines()
    records = [json.loads(line) for line in lines]
    of_kind = [place for place, record in enumerate(records) if record["record"] == kind]
    place = of_kind[index]
    before = json.loads(lines[place])
    change(records[place])
    lines[place] = json.dumps(records[place]).encode()
    copy = path.with_suffix(".changed")
    copy.write_bytes(b"\n".join(lines) + b"\n")
    return copy, before


def test_a_planted_difference_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path / "steps")

    def give_less(plan: dict[str, Any]) -> None:
        plan["rows"][0][2] += 1

    path, before = changed(tmp_path / "steps", give_less, "plan", 40)
    found = replay_steps(path).difference
    assert found is not None
    assert found.step == before["step"]
    assert str(tuple(before["rows"][0])) in found.replayed
    assert main(["simulate", "replay", "--steps", str(path)]) == 1
    assert f"step {before['step']} differs in its rows" in capsys.readouterr().out
    assert main(["simulate", "replay", "--steps", str(tmp_path / "steps")]) == 0


def test_another_answer_is_named(tmp_path: Path) -> None:
    record(tmp_path / "steps")

    def end_otherwise(applied: dict[str, Any]) -> None:
        applied["outcomes"] = [
            [request, tokens, "stop" if end else end] for request, tokens, end in applied["outcomes"]
        ]

    lines = [json.loads(line) for line in (tmp_path / "steps").read_text().splitlines()]
    applied = [line for line in lines if line["record"] == "apply"]
    index = next(place for place, line in enumerate(applied) if any(each[2] == "length" for each in line["outcomes"]))
    path, before = changed(tmp_path / "steps", end_otherwise, "apply", index)
    found = replay_steps(path).difference
    assert found is not None
    assert (found.step, found.what) == (before["step"], "what requests were told (request, tokens, end)")
    assert "length" in found.replayed


def test_what_requests_share_counts(tmp_path: Path) -> None:
    record(tmp_path / "steps")
    whole = tmp_path / "steps"
    lines = [json.loads(line) for line in whole.read_text().splitlines()]
    largest = max(max(line.get("blocks", []), default=0) for line in lines)
    for number, line in enumerate(line for line in lines if line["record"] == "content"):
        line["blocks"] = [largest + 1 + 100 * number + place for place in range(len(line["blocks"]))]
    other = tmp_path / "other"
    other.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert replay_steps(other).difference is not None


def test_another_scheduler_is_another_run(tmp_path: Path) -> None:
    record(tmp_path / "steps")

    def have_less(begin: dict[str, Any]) -> None:
        begin["config"]["num_blocks"] -= 4

    path, _ = changed(tmp_path / "steps", have_less, "begin", 0)
    assert replay_steps(path).difference is not None


def test_a_run_with_restrictions_is_repeated(tmp_path: Path) -> None:
    loop = make_loop(tmp_path / "steps", "fcfs")
    for number in (1, 2, 3):
        sampling = SamplingParams(max_tokens=6, temperature=0.0, allowed_token_ids=(5, 6) if number == 2 else None)
        request = GenerateRequest(request_id=RequestId(number), prompt_token_ids=(1, 2, 3, number), sampling=sampling)
        loop.submit(request)
    while loop.busy:
        loop.step()
    loop.close()
    replayed = replay_steps(tmp_path / "steps")
    assert replayed.difference is None, replayed
    assert replayed.tokens == 18


def test_steps_of_a_trace_have_their_times(tmp_path: Path) -> None:
    record(tmp_path / "steps")
    line = Line((1,), (2e-3,))
    latency = StepLatency(decode=line, mixed=line, context_token_s=0.0, longest_token_s=0.0, pair_s=0.0, chunk_s=0.0)
    found = compare_step_times(tmp_path / "steps", latency)
    assert sum(each.steps for each in found) == replay_steps(tmp_path / "steps").steps
    assert all(each.fitted_p50_ms == 2.0 for each in found)
    assert all(each.recorded_p50_ms >= 3.0 for each in found)  # the clock goes on by 3 ms whenever it is read
    assert all(" steps, median" in str(each) for each in found)


def test_a_trace_of_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "steps").write_text(msgspec.json.encode({"record": "hold", "requests": []}).decode() + "\n")
    with pytest.raises(InvalidRequest, match="begins with one"):
        replay_steps(tmp_path / "steps")
