"""Ranks as processes on a CPU: the same tokens as one rank, and no rank waits for one that is gone."""

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from openinfer_core import (
    EngineClosed,
    Failed,
    FailureKind,
    Finished,
    GenerateRequest,
    Refused,
    RequestId,
    SamplingParams,
    TokenEvent,
    Tokens,
    find_plugin,
)
from openinfer_core.errors import ContractViolation
from openinfer_core.process.local import InProcessEngine
from openinfer_core.scheduling import StepPlan
from openinfer_engine import EngineOptions, GroupBroken, StepLoop, build_loop, resolve
from openinfer_engine.distributed.communicator import Communicator
from openinfer_engine.distributed.socket_communicator import SocketCommunicator
from openinfer_engine.engine_spec import EngineSpec
from openinfer_engine.kv_tiers.pool import HostPool
from openinfer_engine.options import LoadFormat
from openinfer_engine.worker.process_group import CHILD_MODULE, ProcessGroup
from openinfer_engine.worker.process_runner import ProcessRunner
from openinfer_engine.worker.runner import DoneStep, PendingStep

FAMILY: Any = find_plugin("openinfer.models", "qwen3").load()()
MODEL_DIR: Path = find_plugin("openinfer.checkpoints", "tiny").load()()


def make_loop(ranks: int, model_dir: Path = MODEL_DIR, definition: Any = FAMILY.definition, **options: Any) -> StepLoop:
    defaults: dict[str, Any] = {
        "num_blocks": 40,
        "max_num_seqs": 4,
        "max_step_tokens": 32,
        "tensor_parallel_size": ranks,
        "rank_host": "process",
    }
    return build_loop(resolve(definition, model_dir, EngineOptions(**(defaults | options))))


def make_request(index: int, **sampling: Any) -> GenerateRequest:
    params = SamplingParams(**{"max_tokens": 12, "temperature": 0.0, **sampling})
    prompt = tuple((7 * index + 3 * place) % 250 for place in range(5 + 9 * index))
    return GenerateRequest(request_id=RequestId(index), prompt_token_ids=prompt, sampling=params)


def run(loop: StepLoop, requests: Sequence[GenerateRequest]) -> dict[int, list[Tokens]]:
    said: dict[int, list[Tokens]] = {request.request_id: [] for request in requests}
    events = [event for request in requests for event in loop.submit(request)]
    while loop.busy:
        events += loop.step()
    loop.close()
    for event in events:
        assert not isinstance(event, Failed), event
        if isinstance(event, Tokens):
            said[event.request_id].append(event)
    return said


def step_forever(loop: StepLoop) -> None:
    while True:
        loop.step()


async def read_all(engine: InProcessEngine, seen: list[TokenEvent]) -> None:
    async for events in engine.events():
        seen += events


def runner_of(loop: StepLoop) -> ProcessRunner:
    assert isinstance(loop.runner, ProcessRunner)
    return loop.runner


REQUESTS = [
    make_request(0, logprobs=2),
    make_request(1, temperature=0.8, seed=5),
    make_request(2, prompt_logprobs=0),
    make_request(3, presence_penalty=1.0, logit_bias={9: 2.0}),
    make_request(4, temperature=1.0, seed=1, max_tokens=30),
]


@pytest.fixture(scope="module")
def four_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that four ranks can share; without weights."""
    folder = tmp_path_factory.mktemp("four-heads")
    config = json.loads((MODEL_DIR / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 4, "num_hidden_layers": 2}))
    return folder


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_in_processes_say_what_one_rank_says(ranks: int, four_heads: Path) -> None:
    given = {"model_dir": four_heads, "load_format": LoadFormat.DUMMY} if ranks > 2 else {}
    of_one_rank = run(make_loop(1, **given), REQUESTS)
    said = run(make_loop(ranks, **given), REQUESTS)
    for request_id, expected in of_one_rank.items():
        found = said[request_id]
        assert [each.token_ids for each in found] == [each.token_ids for each in expected]
        for one, other in zip(found, expected, strict=True):
            for mine, theirs in zip(one.logprobs or (), other.logprobs or (), strict=True):
                assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
            for mine, theirs in zip(one.prompt_logprobs or (), other.prompt_logprobs or (), strict=True):
                assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)


def test_ranks_in_processes_take_steps_of_no_rows(four_heads: Path) -> None:
    given = {"model_dir": four_heads, "load_format": LoadFormat.DUMMY}
    expected = run(make_loop(2, **given), REQUESTS)
    loop = make_loop(2, **given)
    runner, launched = runner_of(loop), list[int]()

    def launch_after_an_empty_one(plan: StepPlan) -> PendingStep:
        empty = launch(no_rows(plan.step))
        launched.append(len(empty.result().new_counts))
        return launch(plan)

    launch, runner.launch = runner.launch, launch_after_an_empty_one  # type: ignore[method-assign]
    assert run(loop, REQUESTS) == expected
    assert len(launched) > 30
    assert not any(launched)


def no_rows(step: int) -> StepPlan:
    none = np.zeros(0, np.int32)
    return StepPlan(
        step=step,
        slots=none,
        starts=none,
        counts=none,
        num_host_tokens=none,
        max_new=none,
        token_ids=none,
        new_block_counts=none,
        new_blocks=none,
    )


def test_the_death_of_a_rank_ends_the_step_and_the_loop_says_which_and_how(four_heads: Path) -> None:
    loop = make_loop(4, four_heads, load_format=LoadFormat.DUMMY)
    loop.submit(make_request(0, max_tokens=500))
    loop.step()
    os.kill(runner_of(loop).process_ids[1], signal.SIGKILL)
    with pytest.raises(GroupBroken, match="rank 2 has died: its process ended with signal 9"):
        step_forever(loop)
    assert loop.busy
    with pytest.raises(GroupBroken, match="rank 2 has died"):
        loop.step()
    loop.close()


def test_the_death_of_a_rank_ends_loads_and_saves_that_wait_for_it(tmp_path: Path) -> None:
    setting = f"disk={tmp_path}/{{rank}},64MiB"
    loop = make_loop(2, kv_tier=[setting], block_size_tokens=4)
    (process_id,) = runner_of(loop).process_ids
    loop.submit(make_request(3, max_tokens=1))
    while loop.scheduler.unfinished_ids:
        loop.step()
    os.kill(process_id, signal.SIGKILL)  # while it saves what the request left
    with pytest.raises(GroupBroken, match="rank 1 has died"):
        step_forever(loop)
    loop.close()


def test_what_ranks_in_processes_have_saved_is_found_by_the_next_ones(tmp_path: Path) -> None:
    setting = f"disk={tmp_path}/{{rank}},64MiB"
    answers: list[list[int]] = []
    for tier_tokens in (0, 28):
        loop = make_loop(2, kv_tier=[setting], block_size_tokens=4)
        events = loop.submit(make_request(3, max_tokens=8))
        while loop.busy:
            events += loop.step()
        stats = loop.stats()
        loop.close()
        answers.append([token for event in events if isinstance(event, Tokens) for token in event.token_ids])
        assert stats.tier_tokens == tier_tokens
        (tier,) = stats.kv_tiers
        assert tier.loaded_blocks == 2 * tier_tokens // 4
    assert answers[0] == answers[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


@pytest.mark.parametrize("is_idle", [False, True])
def test_the_engine_ends_when_a_rank_dies_and_its_requests_get_a_terminal_event(is_idle: bool) -> None:
    loop = make_loop(2)
    (process_id,) = runner_of(loop).process_ids

    async def scenario() -> list[TokenEvent]:
        engine = InProcessEngine(loop)
        seen: list[TokenEvent] = []
        if not is_idle:
            engine.submit(make_request(0, max_tokens=500))
        os.kill(process_id, signal.SIGKILL)
        with pytest.raises(EngineClosed):
            await read_all(engine, seen)
        await engine.close()
        return seen

    events = asyncio.run(asyncio.wait_for(scenario(), 30))
    assert [event.kind for event in events if isinstance(event, Failed)] == [FailureKind.SHUTDOWN] * (not is_idle)


def test_a_rank_that_refuses_to_start_ends_the_start_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENINFER_LOG_LEVEL", "chatty")
    with pytest.raises(Refused, match="rank 1: OPENINFER_LOG_LEVEL is 'chatty'"):
        make_loop(2)


class Unknown:
    """A definition that only this process knows."""

    name = "unheard-of"

    def __getattr__(self, name: str) -> Any:
        return getattr(FAMILY.definition, name)


def test_a_rank_that_fails_to_start_ends_the_start_with_its_reason() -> None:
    with pytest.raises(GroupBroken, match=r"rank 1 failed: .*unheard-of"):
        make_loop(2, definition=Unknown())


def test_an_engine_process_has_ranks_of_its_own() -> None:
    options = EngineOptions(num_blocks=40, max_num_seqs=4, tensor_parallel_size=2, rank_host="process")

    async def scenario() -> list[TokenEvent]:
        engine = FAMILY.launch(MODEL_DIR, options)
        engine.submit(make_request(0))
        seen: list[TokenEvent] = []
        async for events in engine.events():
            seen += events
            if any(isinstance(event, Finished) for event in events):
                break
        await engine.close()
        return seen

    events = asyncio.run(asyncio.wait_for(scenario(), 30))
    expected = run(make_loop(1), [make_request(0)])[0]
    found = [token for event in events if isinstance(event, Tokens) for token in event.token_ids]
    assert found == [token for event in expected for token in event.token_ids]


def test_a_rank_whose_engine_is_gone_ends() -> None:
    rank = subprocess.Popen([sys.executable, "-m", CHILD_MODULE], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert rank.communicate(timeout=30) == (b"", None)
    assert rank.returncode == 1


def test_ranks_use_the_smallest_pool() -> None:
    loop = make_loop(2, num_blocks=None, kv_cache_bytes=1 << 20)
    assert loop.info.num_blocks > 0
    loop.close()


def test_what_rank_0_raises_ends_the_other_ranks_at_once() -> None:
    loop = make_loop(2)
    runner = runner_of(loop)
    with pytest.raises(ContractViolation, match="given no blocks"):
        runner.launch(impossible_plan()).result()
    assert runner.failure is not None
    loop.close()


def impossible_plan() -> StepPlan:
    """A row whose positions have no blocks."""
    one, none = np.ones(1, np.int32), np.zeros(0, np.int32)
    return StepPlan(
        step=0,
        slots=0 * one,
        starts=0 * one,
        counts=one,
        num_host_tokens=one,
        max_new=np.ones(1, np.int32),
        token_ids=one,
        new_block_counts=0 * one,
        new_blocks=none,
    )


def make_spec() -> EngineSpec:
    options = EngineOptions(num_blocks=40, max_num_seqs=4, tensor_parallel_size=2, rank_host="process")
    return EngineSpec.of(FAMILY.definition, MODEL_DIR, options)


class WaitingRank:
    """Leaves once all other ranks answer."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator

    def launch(self, plan: StepPlan) -> DoneStep:
        raise NotImplementedError

    def pool_memory(self) -> HostPool:
        raise NotImplementedError

    def close(self) -> None:
        self._communicator.barrier()


def test_close_kills_a_rank_that_hangs_and_frees_rank_0_that_waits_for_it() -> None:
    processes = ProcessGroup(make_spec(), 1)
    ticket, communicator = SocketCommunicator.open(2)
    processes.agree(processes.smallest_pool(40), ticket, communicator)
    processes.wait_ready()
    (process_id,) = processes.process_ids
    os.kill(process_id, signal.SIGSTOP)
    runner = ProcessRunner(WaitingRank(communicator), processes, close_deadline_s=0.1)
    with pytest.raises(GroupBroken, match=r"rank 0 has not left within 0\.1 s"):
        runner.close()
    with pytest.raises(ProcessLookupError):
        os.kill(process_id, 0)
    with pytest.raises(GroupBroken, match="rank 0 has not left"):
        communicator.barrier()
    communicator.close()


ENGINE_THAT_STOPS_ITS_RANK = """
import os, signal, sys, msgspec
from openinfer_engine.engine_spec import EngineSpec
from openinfer_engine.worker.process_group import ProcessGroup
processes = ProcessGroup(msgspec.json.decode(sys.argv[1], type=EngineSpec), 1)
processes.smallest_pool(40)
(process_id,) = processes.process_ids
os.kill(process_id, signal.SIGSTOP)
print(process_id, flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process that is stopped does not notice")
def test_a_rank_that_is_stopped_ends_with_its_engine() -> None:
    command = [sys.executable, "-c", ENGINE_THAT_STOPS_ITS_RANK, msgspec.json.encode(make_spec()).decode()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as engine:
        assert engine.stdout is not None
        rank = os.pidfd_open(int(engine.stdout.readline()))
        engine.kill()
    has_ended, _, _ = select.select([rank], [], [], 30)
    os.close(rank)
    assert has_ended == [rank]


def test_what_is_no_error_does_not_wait_for_a_cause() -> None:
    processes = ProcessGroup(make_spec(), 0)
    interrupt = KeyboardInterrupt()
    assert processes.cause_of(interrupt) is interrupt
    processes.close()
