"""Random walks of engines that sleep, wake, pause and change adapters, with requests on the way, on one rank and two.

Requests of several adapters arrive, are preempted and aborted meanwhile, and a rank dies anywhere.

Every request ends, and says what it says alone; a death ends the engine by name, never in silence.
"""

import os
import random
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from lifecycle_models import CPU_CONFIG, LEVELS, RANKS, SMALL, MakeLoop, opened_loops, write_adapted

from openinfer_core import Failed, Finished, FinishReason, GenerateRequest, RequestId, SamplingParams, TokenEvent
from openinfer_core.control import InFlight, LoadAdapter, Pause, Resume, Sleep, UnloadAdapter, Wake
from openinfer_core.engine import EngineState
from openinfer_engine import StepLoop
from openinfer_engine.errors import GroupBroken
from openinfer_engine.lora.rank_adapters import RankAdapters
from openinfer_engine.testing import Answer
from openinfer_engine.testing.answers import run_at_once
from openinfer_engine.worker.process_runner import ProcessRunner

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is given back on Linux")

ADAPTERS = {"two": 2, "eight": 8, "sixteen": 16}
NAMES = (*ADAPTERS, None)
NUM_REQUESTS = 12
WALK = (
    ["step"] * 6 + ["submit"] * 3 + ["sleep", "wake", "wake", "pause", "resume", "resume", "exchange_adapter", "abort"]
)
MOST_STEPS = 5_000
"""Of a walk's end, far beyond what it takes: a loop that is busy and comes no further fails."""
PROCESSES: Mapping[str, object] = {"tensor_parallel_size": 2, "rank_host": "process"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapted(tmp_path_factory.mktemp("adapted"), CPU_CONFIG, ADAPTERS)


@pytest.fixture
def make_loop(folder: Path) -> Iterator[MakeLoop]:
    lora = [f"{name}={folder / name}" for name in ADAPTERS]
    # Blocks for three of the longest requests, slots for two adapters: both are taken from requests on the way.
    given = {**SMALL, "num_blocks": 28, "max_step_tokens": 64, "max_loras": 2, "lora": lora, "lora_root": str(folder)}
    with opened_loops() as opened:
        yield lambda **options: opened(folder / "old", **{**given, **options})


def requests(seed: int) -> list[GenerateRequest]:
    rng = random.Random(seed)
    return [
        GenerateRequest(
            request_id=RequestId(number),
            prompt_token_ids=tuple(rng.choices(range(CPU_CONFIG["vocab_size"]), k=rng.randint(3, 50))),
            sampling=SamplingParams(max_tokens=rng.randint(2, 20), temperature=0),
            lora=NAMES[number % len(NAMES)],
        )
        for number in range(NUM_REQUESTS)
    ]


@dataclass
class Walk:
    """One engine, and what becomes of its requests."""

    loop: StepLoop
    rng: random.Random
    coming: list[GenerateRequest]
    answers: dict[int, Answer] = field(default_factory=dict)
    aborted: set[int] = field(default_factory=set)
    done: set[str] = field(default_factory=set)
    has_late: bool = False
    late_answers: list[str | None] = field(default_factory=list)

    @property
    def open_ids(self) -> list[int]:
        return [number for number, answer in self.answers.items() if answer.finished is None]

    @property
    def state(self) -> EngineState:
        return self.loop.stats().state

    def deliver(self, events: list[TokenEvent]) -> None:
        for event in events:
            assert not isinstance(event, Failed), event
            self.answers[event.request_id].take(event)

    def go_on(self, what: str) -> None:
        """One thing, if it can be now."""
        is_asleep = self.state is EngineState.ASLEEP
        can = {
            "step": True,
            "submit": bool(self.coming) and not is_asleep,
            "abort": bool(self.open_ids),
            "sleep": not is_asleep,
            "wake": is_asleep,
            "pause": self.state is EngineState.SERVING,
            "resume": self.state is EngineState.PAUSED,
            "exchange_adapter": True,
        }
        if can[what]:
            self.done.add(what)
            getattr(self, what)()
            self.loop.scheduler.check_integrity()

    def step(self) -> None:
        for _ in range(self.rng.randint(1, 4)):
            self.deliver(self.loop.step())

    def submit(self) -> None:
        request = self.coming.pop()
        self.answers[request.request_id] = Answer()
        self.deliver(self.loop.submit(request))

    def abort(self) -> None:
        number = self.open_ids[0]
        self.aborted.add(number)
        self.deliver(self.loop.abort(RequestId(number)))

    def sleep(self) -> None:
        before = set(self.open_ids)
        ends = self.rng.random() < 0.1
        requests = InFlight.ABORT if ends else InFlight.KEEP
        self.deliver(self.loop.control(Sleep(keeps_weights=self.rng.random() < 0.5, requests=requests)))
        if ends:
            self.aborted |= before
            assert not self.open_ids

    def wake(self) -> None:
        self.deliver(self.loop.control(Wake()))

    def pause(self) -> None:
        self.deliver(self.loop.control(Pause()))

    def resume(self) -> None:
        self.deliver(self.loop.control(Resume()))

    def exchange_adapter(self) -> None:
        """Under a name that no request has: loads go on between all else."""
        if self.has_late and self.late_answers:
            assert self.late_answers == [None]
            self.deliver(self.loop.control(UnloadAdapter("late")))
            self.has_late, self.late_answers = False, []
        elif not self.has_late:
            assert self.loop.begin_control(LoadAdapter("late", "eight"), self.late_answers.append)
            self.has_late = True

    def end(self) -> None:
        if self.state is EngineState.ASLEEP:
            self.wake()
        self.resume()
        while self.coming:
            self.submit()
        for _ in range(MOST_STEPS):
            if not self.loop.busy:
                break
            self.deliver(self.loop.step())
        assert not self.loop.busy, f"the loop comes no further; open are {self.open_ids}"
        self.loop.scheduler.check_integrity()


def steps_of(rng: random.Random, count: int) -> list[str]:
    """Chosen ahead: what an engine does meanwhile, and how fast, changes nothing of what comes."""
    return rng.choices(WALK, k=count)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("ranks", RANKS)
def test_every_request_ends_as_it_does_alone(make_loop: MakeLoop, ranks: Mapping[str, object], seed: int) -> None:
    loop, asked = make_loop(**ranks), requests(seed)
    expected = run_at_once(loop, asked)
    rng = random.Random(seed)
    walk = Walk(loop, rng, list(asked))
    for what in steps_of(rng, 80):
        walk.go_on(what)
    walk.end()
    assert sorted(walk.answers) == sorted(expected)
    for number, answer in walk.answers.items():
        assert isinstance(answer.finished, Finished)
        found, whole = answer.token_ids, expected[number].token_ids
        if answer.finished.reason is FinishReason.ABORT:
            assert number in walk.aborted
            assert found == whole[: len(found)]
        else:
            assert found == whole
    assert walk.done >= set(WALK) - {"abort"}
    assert loop.stats().blocks_used == 0


@pytest.mark.parametrize("keeps_weights", LEVELS)
@pytest.mark.parametrize("ranks", RANKS)
def test_batch_in_flight_of_all_adapters_goes_on_after_each_sleep(
    make_loop: MakeLoop, ranks: Mapping[str, object], *, keeps_weights: bool
) -> None:
    loop, asked = make_loop(**ranks), requests(7)
    expected = {key: each.token_ids for key, each in run_at_once(loop, asked).items()}
    for num_steps in (1, 3, 6):
        walk = Walk(loop, random.Random(0), list(asked))
        while walk.coming:
            walk.submit()
        for _ in range(num_steps):
            walk.deliver(loop.step())
        walk.deliver(loop.control(Sleep(keeps_weights=keeps_weights)))
        assert walk.open_ids
        walk.end()
        assert {key: each.token_ids for key, each in walk.answers.items()} == expected


@pytest.mark.parametrize("seed", range(3))
def test_rank_that_dies_on_the_way_ends_the_engine_by_name(make_loop: MakeLoop, seed: int) -> None:
    loop, rng = make_loop(**PROCESSES), random.Random(seed)
    walk = Walk(loop, rng, requests(seed))
    for what in steps_of(rng, rng.randint(1, 40)):
        walk.go_on(what)
    assert isinstance(loop.runner, ProcessRunner)
    os.kill(loop.runner.process_ids[0], signal.SIGKILL)
    with pytest.raises(GroupBroken, match="rank 1 has died"):
        walk.end()
    with pytest.raises(GroupBroken, match="rank 1 has died"):
        loop.step()


def test_rank_that_is_asked_says_where_it_is_and_goes_on(
    make_loop: MakeLoop, capfd: pytest.CaptureFixture[str]
) -> None:
    loop, asked = make_loop(**PROCESSES), requests(0)
    expected = run_at_once(loop, asked)
    assert isinstance(loop.runner, ProcessRunner)
    os.kill(loop.runner.process_ids[0], signal.SIGUSR1)
    said, until_s = "", time.monotonic() + 60
    while "in next" not in said and time.monotonic() < until_s:
        said += capfd.readouterr().err
    assert "worker/process.py" in said
    assert run_at_once(loop, asked).keys() == expected.keys()


def test_slots_that_are_not_restored_would_be_seen(make_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    loop, asked = make_loop(), requests(7)
    expected = {key: each.token_ids for key, each in run_at_once(loop, asked).items()}
    monkeypatch.setattr(RankAdapters, "restore_slots", lambda self: ())
    walk = Walk(loop, random.Random(0), list(asked))
    while walk.coming:
        walk.submit()
    walk.deliver(loop.step())
    walk.deliver(loop.control(Sleep()))
    walk.end()
    assert {key: each.token_ids for key, each in walk.answers.items()} != expected
