"""A step trace of an engine is repeated exactly; a step that is another one is named."""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from openinfer.commands.main import main
from openinfer_bench.simulate.latency import Line, StepLatency
from openinfer_bench.simulate.replay.step_times import compare_step_times
from openinfer_bench.simulate.replay.steps import replay_steps
from openinfer_core import (
    EngineCapability,
    EngineInfo,
    Failed,
    FailureKind,
    GenerateRequest,
    InvalidRequest,
    RequestId,
    SamplingParams,
    TokenEvent,
    Tokens,
    find_plugin,
)
from openinfer_core.control import InFlight, Pause, Resume, Sleep, UnloadAdapter, UpdateWeights, Wake
from openinfer_core.engine import AdapterStats
from openinfer_core.plugins import QUEUE_POLICIES, SCHEDULERS
from openinfer_core.request import LoadedAdapter, RetainedPrefix
from openinfer_core.scheduling import QueuePolicyConfig, SchedulerConfig, StepPlan
from openinfer_core.testing import fake_model
from openinfer_core.testing.fake_device import FakeDevice
from openinfer_engine.adapters import AdapterLoss
from openinfer_engine.lifecycle.lifecycle import WeightsInUse
from openinfer_engine.lifecycle.orders import WeightsOrder, WeightsSource
from openinfer_engine.loop import StepLoop
from openinfer_engine.tracing.step_trace import Begin, StepTrace
from openinfer_engine.worker.runner import DoneStep

NUM_REQUESTS = 99
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

    def obey(self, order: WeightsOrder) -> None:
        """Weights come and go; what a step yields does not depend on them."""

    def close(self) -> None:
        pass


def make_loop(path: Path, policy: str, *, adapters: "Adapters | None" = None) -> StepLoop:
    now_s = 0.0
    config = CONFIG if adapters is None else msgspec.structs.replace(CONFIG, max_adapters=2)

    def clock() -> float:
        nonlocal now_s
        now_s += 0.003
        return now_s

    made: Any = find_plugin(SCHEDULERS, "token-budget").make(
        config, find_plugin(QUEUE_POLICIES, policy).make(QueuePolicyConfig(tenant_weights={"a": 3.0}))
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
    begin = Begin(scheduler="token-budget", queue_policy=policy, config=config, tenant_weights={"a": 3.0})
    trace = StepTrace(path, begin)
    if adapters is not None:
        made.use_adapters(trace.recorded_port(adapters))
        can = (EngineCapability.LOAD_ADAPTER,)
        info = msgspec.structs.replace(info, capabilities=can)
    return StepLoop(
        info=info,
        scheduler=made,
        runner=Runner(),
        adapters=adapters,
        weights=WeightsInUse(WeightsSource(), root=None),
        step_trace=trace,
        clock=clock,
    )


class Adapters:
    """Implements `AdapterTable` and `AdapterPort`: six names; what is read takes three steps, and most are dropped."""

    def __init__(self) -> None:
        self.names = {f"adapter-{number}": bytes([number]) * 16 for number in range(6)}
        self.pinned: list[bytes] = []
        self._coming: dict[bytes, int] = {}
        self._held: set[bytes] = set()

    def find(self, name: str, *, tenant: str) -> LoadedAdapter | None:
        del tenant
        return LoadedAdapter(digest=self.names[name]) if name in self.names else None

    def unload(self, name: str) -> bytes | None:
        return self.names.pop(name)

    @property
    def is_loading(self) -> bool:
        return bool(self._coming)

    def settle(self) -> list[AdapterLoss]:
        self._coming = {digest: steps - 1 for digest, steps in self._coming.items()}
        for digest in [digest for digest, steps in self._coming.items() if steps <= 0]:
            del self._coming[digest]
            self._held = {*self._held.intersection(self.pinned), digest}
        return []

    def is_held(self, digest: bytes) -> bool:
        return digest in self._held

    def hold(self, digest: bytes) -> None:
        if digest not in self._held:
            self._coming.setdefault(digest, 3)

    def pin(self, digest: bytes) -> None:
        assert digest in self._held
        self.pinned.append(digest)

    def unpin(self, digest: bytes) -> None:
        self.pinned.remove(digest)

    def applied(self, plan: StepPlan) -> None:
        for load in plan.adapter_loads:
            self.unpin(load.digest)

    def stats(self, users: dict[bytes, tuple[int, int]]) -> tuple[AdapterStats, ...]:
        del users
        return ()

    def begin_load(self, command: Any, answer: Any) -> None:
        raise NotImplementedError

    def count_waiting_by(self, num_waiting: Any) -> None: ...

    def release(self, digest: bytes) -> None: ...

    def forget(self, digest: bytes) -> None: ...

    def wait(self, timeout_s: float) -> None: ...

    def close(self) -> None: ...


def conversations(draw: random.Random) -> Iterator[GenerateRequest]:
    """Turns that begin with those before them, what the model said among it; some stop early, some have a salt."""
    told: list[tuple[int, ...]] = [(1, 2, 3, 4, 5, 6, 7, 8, 9)]
    for number in range(1, 1 + NUM_REQUESTS):
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


def record(
    path: Path, *, seed: int = 1, policy: str = "fair-share", asks: Callable[[int], dict[str, Any]] | None = None
) -> tuple[StepLoop, int]:
    """The loop that ran, and how many tokens it told. `asks` gives further fields of a request by its number."""
    draw, loop = random.Random(seed), make_loop(path, policy)
    events: list[TokenEvent] = []
    for request in conversations(draw):
        loop.submit(msgspec.structs.replace(request, **({} if asks is None else asks(request.request_id))))
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
    assert (replayed.steps, replayed.requests) == (stats.steps, NUM_REQUESTS)
    assert replayed.tokens == num_tokens > 500
    assert replay_steps(tmp_path / "steps") == replayed


def retains(number: int) -> dict[str, Any]:
    """Every third one, of five conversations; every fifth the beginning of its prompt."""
    prefixes = () if number % 5 else (RetainedPrefix(num_tokens=9, retain_s=1000),)
    turn = {} if number % 3 else {"retain_s": 1000.0, "cache_key": f"conversation {number % 5}"}
    return {"retained_prefixes": prefixes, **turn}


@pytest.mark.parametrize(
    ("asks", "fields"),
    [(lambda number: {"choice": number % 4}, ["choice"]), (retains, ["retain_s", "conversation", "retained_prefixes"])],
    ids=["choices", "retention"],
)
def test_what_requests_ask_of_order_and_cache_is_repeated(tmp_path: Path, asks: Any, fields: list[str]) -> None:
    record(tmp_path / "steps", asks=asks)
    assert replay_steps(tmp_path / "steps").difference is None
    records = [json.loads(line) for line in (tmp_path / "steps").read_bytes().splitlines()]
    lacking = [{name: value for name, value in each.items() if name not in fields} for each in records]
    (tmp_path / "lacking").write_text("".join(json.dumps(each) + "\n" for each in lacking))
    assert replay_steps(tmp_path / "lacking").difference is not None
    assert "conversation 1" not in (tmp_path / "steps").read_text()


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


def record_with_adapters(path: Path) -> StepLoop:
    """Requests of six adapters in two slots, two of which are unloaded meanwhile."""
    draw, adapters = random.Random(3), Adapters()
    loop = make_loop(path, "fair-share", adapters=adapters)
    ends: list[TokenEvent] = []
    for number, request in enumerate(conversations(draw)):
        name = draw.choice((None, *(f"adapter-{each}" for each in range(6))))
        ends += loop.submit(msgspec.structs.replace(request, lora=name))
        if number in (20, 40):
            ends += loop.control(UnloadAdapter(f"adapter-{number // 20}"))
        for _ in range(draw.randint(0, 6)):
            ends += loop.step()
    while loop.busy:
        ends += loop.step()
    loop.close()
    kinds = [event.kind for event in ends if isinstance(event, Failed)]
    assert FailureKind.NOT_FOUND in kinds
    return loop


def test_a_run_with_adapters_is_repeated_exactly(tmp_path: Path) -> None:
    loop = record_with_adapters(tmp_path / "steps")
    lines = [json.loads(line) for line in (tmp_path / "steps").read_text().splitlines()]
    answers = [line["is_held"] for line in lines if line["record"] == "held"]
    assert {True, False} == {*answers}, "adapters must come and go, or this shows little"
    assert any(line["outcomes"] for line in lines if line["record"] == "drop")
    replayed = replay_steps(tmp_path / "steps")
    assert replayed.difference is None, replayed
    assert replayed.steps == loop.stats().steps > 100


@pytest.mark.parametrize("kind", ["held", "drop"])
def test_another_answer_about_an_adapter_is_another_run(tmp_path: Path, kind: str) -> None:
    record_with_adapters(tmp_path / "steps")

    def change(changing: dict[str, Any]) -> None:
        if kind == "held":
            changing["is_held"] = not changing["is_held"]
        else:
            changing["adapter"] = 99

    path, _ = changed(tmp_path / "steps", change, kind, 0)
    assert replay_steps(path).difference is not None


def record_with_sleeps(path: Path) -> StepLoop:
    """Conversations through pauses, sleeps and updates, some of which end what runs, with adapters."""
    draw, loop = random.Random(5), make_loop(path, "fair-share", adapters=Adapters())
    ends: list[TokenEvent] = []
    for number, request in enumerate(conversations(draw)):
        name = draw.choice((None, None, "adapter-1", "adapter-2", "adapter-3"))
        ends += loop.submit(msgspec.structs.replace(request, lora=name))
        for _ in range(draw.randint(0, 6)):
            ends += loop.step()
        if number % 9 == 8:
            requests = draw.choice((InFlight.KEEP, InFlight.KEEP, InFlight.ABORT))
            version = f"{draw.randint(0, 2):064x}"  # weights that come back have their version again
            begin, end = draw.choice(
                (
                    (Sleep(requests=requests), Wake()),
                    (Pause(requests), Resume()),
                    (UpdateWeights(segments=("new",), content_hash=version, requests=requests), Resume()),
                )
            )
            ends += loop.control(begin)
            ends += loop.submit(msgspec.structs.replace(request, request_id=RequestId(1000 + number)))
            ends += loop.control(end)
    while loop.busy:
        ends += loop.step()
    loop.close()
    told = loop.stats()
    assert told.sleeps > 0
    assert told.weight_updates > 0
    assert any(isinstance(event, Failed) and event.kind is FailureKind.UNAVAILABLE for event in ends)
    return loop


def test_a_run_with_sleeps_and_updates_is_repeated_exactly(tmp_path: Path) -> None:
    loop = record_with_sleeps(tmp_path / "steps")
    lines = [json.loads(line) for line in (tmp_path / "steps").read_text().splitlines()]
    assert len({line["weights"] for line in lines if line["record"] == "renew"}) > 1
    replayed = replay_steps(tmp_path / "steps")
    assert replayed.difference is None, replayed
    assert replayed.steps == loop.stats().steps > 100


@pytest.mark.parametrize("kind", ["park", "renew"])
def test_a_trace_without_its_sleeps_is_another_run(tmp_path: Path, kind: str) -> None:
    record_with_sleeps(tmp_path / "steps")
    lines = (tmp_path / "steps").read_bytes().splitlines(keepends=True)
    left = [line for line in lines if json.loads(line)["record"] not in (kind, *(("renew",) if kind == "park" else ()))]
    assert len(left) < len(lines)
    (tmp_path / "other").write_bytes(b"".join(left))
    assert replay_steps(tmp_path / "other").difference is not None


def test_requests_that_did_not_leave_as_recorded_are_named(tmp_path: Path) -> None:
    record_with_sleeps(tmp_path / "steps")
    path, _ = changed(tmp_path / "steps", lambda park: park.update(has_ended=False), "park", 0)
    found = replay_steps(path).difference
    assert found is not None
    assert found.what == "whether all requests left the device"


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
