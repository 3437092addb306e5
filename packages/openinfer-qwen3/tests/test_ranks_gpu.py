"""Two GPUs of one engine: adapters, sleep and new weights on ranks that are processes.

Random weights at a head dimension that the GPU's attention serves. Skipped, with the reason, where GPUs are fewer.
"""

import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_model import CONFIG
from lifecycle_models import LEVELS, MakeLoop, opened_loops, write_adapted

from openinfer_core import GenerateRequest, RequestId, SamplingParams
from openinfer_core.control import LoadAdapter, Sleep, UnloadAdapter, UpdateWeights, Wake
from openinfer_core.engine import EngineState
from openinfer_engine import StepLoop
from openinfer_engine.errors import GroupBroken
from openinfer_engine.options import DeviceKind
from openinfer_engine.testing import Answer, prompt_differences, run_at_once
from openinfer_engine.testing.quantised_checkpoints import SCHEMES, write_quantised
from openinfer_engine.testing.quantised_family import projections
from openinfer_engine.worker.process_runner import ProcessRunner

pytestmark = pytest.mark.gpu
RANKS = 2
ADAPTERS = {"one": 1, "eight": 8, "sixteen": 16}
NAMES = ("one", None, "eight", "sixteen", None, "eight", "sixteen", "one")
IN_PRODUCTS: Mapping[str, Any] = {"max_lora_rank": 16, "max_loras": 3}
AROUND_PRODUCTS: Mapping[str, Any] = {"max_lora_rank": 64, "max_loras": 3}
WAYS = [
    pytest.param(IN_PRODUCTS, id="in the products"),
    pytest.param(AROUND_PRODUCTS, id="around the products"),
    pytest.param({"batch_invariant": True}, id="batch-invariant"),
]
LEAST_EFFECT = 0.05
"""Mean difference of log-probabilities below which an adapter might be ignored unseen."""
BF16_LOGPROB = 0.15
ASLEEP_BYTES = 1.2 * (1 << 30)
"""Of each GPU, besides NCCL's."""
NCCL_BYTES = 0.8 * (1 << 30)


@pytest.fixture(scope="module", autouse=True)
def gpus() -> None:
    pytest.importorskip("cupy", reason="ranks on GPUs need CuPy")
    from openinfer_kernels import DeviceUnavailableError
    from openinfer_kernels.cuda.common.device import gpu_count

    try:
        count = gpu_count()
    except DeviceUnavailableError as reason:
        pytest.skip(str(reason))
    if count < RANKS:
        pytest.skip(f"{RANKS} GPUs are needed, and there is {count}")
    from openinfer_kernels.cuda.comm.nccl import register_no_buffers

    try:
        register_no_buffers()  # engines that sleep come after others here, and NCCL reads this once a process
    except DeviceUnavailableError as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models of one config, `old` and `new`, and adapters."""
    return write_adapted(tmp_path_factory.mktemp("adapted"), CONFIG, ADAPTERS)


@pytest.fixture
def make_loop(folder: Path) -> Iterator[MakeLoop]:
    given = {"num_blocks": 256, "max_num_seqs": 16, "device": DeviceKind.CUDA, "tensor_parallel_size": RANKS}

    def make(model: Path | str = "old", *, names: tuple[str, ...] = tuple(ADAPTERS), **options: object) -> StepLoop:
        roots = {"lora_root": str(folder), "weights_root": str(folder)}
        lora = [f"{name}={folder / name}" for name in names]
        return opened(folder / model, **{**given, **roots, "lora": lora, **options})

    with opened_loops() as opened:
        yield make


def requests(names: tuple[str | None, ...] = NAMES, *, max_tokens: int = 16) -> list[GenerateRequest]:
    rng = np.random.default_rng(1)
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0, logprobs=0, prompt_logprobs=0)
    return [
        GenerateRequest(
            request_id=RequestId(i),
            prompt_token_ids=tuple(rng.integers(0, 1024, 60 - 3 * (i % 7)).tolist()),
            lora=name,
            sampling=sampling,
        )
        for i, name in enumerate(names)
    ]


def said(answers: Mapping[int, Answer]) -> dict[int, Any]:
    return {key: (each.token_ids, [one.logprob for one in each.logprobs]) for key, each in sorted(answers.items())}


def tokens(answers: Mapping[int, Answer]) -> dict[int, list[int]]:
    """What engines agree on whose products were tuned each for itself."""
    return {key: each.token_ids for key, each in sorted(answers.items())}


def used_bytes() -> list[int]:
    """Of each GPU, by all processes."""
    import cupy

    found: list[int] = []
    for index in range(RANKS):
        with cupy.cuda.Device(index):
            free, total = cupy.cuda.runtime.memGetInfo()
        found.append(total - free)
    return found


def check_against_cpu(make_loop: MakeLoop, model: Path | str, options: Mapping[str, Any]) -> None:
    asked = requests(max_tokens=1)
    gpus = run_at_once(make_loop(model, **options), asked)
    cpu = run_at_once(make_loop(model, device=DeviceKind.CPU, **{**options, "tensor_parallel_size": 1}), asked)
    differences = prompt_differences(gpus, cpu)
    assert max(differences) < BF16_LOGPROB
    assert np.mean(differences) < BF16_LOGPROB / 5
    plain = run_at_once(make_loop(model, names=(), lora_root=None), requests((None,) * len(NAMES), max_tokens=1))
    for i, name in enumerate(NAMES):
        effect = np.mean(prompt_differences({i: gpus[i]}, {i: plain[i]}))
        assert effect > LEAST_EFFECT if name else effect < BF16_LOGPROB / 5, (name, effect)


@pytest.mark.parametrize("options", [*WAYS, pytest.param({"max_step_tokens": 64}, id="chunks")])
def test_mixed_batches_say_what_the_cpu_says(make_loop: MakeLoop, options: Mapping[str, Any]) -> None:
    check_against_cpu(make_loop, "old", options)


def test_adapters_over_quantised_weights_say_what_the_cpu_says(
    make_loop: MakeLoop, folder: Path, tmp_path: Path
) -> None:
    scheme = SCHEMES["fp8 blocks BF16"]
    write_quantised(folder / "old", tmp_path / "model", scheme, projections(folder / "old"))
    check_against_cpu(make_loop, tmp_path / "model", {})


def test_ranks_hold_what_is_loaded_under_a_name_that_was_used(make_loop: MakeLoop) -> None:
    loop = make_loop(names=(), max_loras=1, batch_invariant=True)
    fresh = make_loop(names=("eight", "sixteen"), batch_invariant=True)
    for content in ("eight", "sixteen", "eight"):
        told: list[str | None] = []
        assert loop.begin_control(LoadAdapter("late", content), told.append)
        while not told:
            loop.step()
        assert told == [None]
        found = said(run_at_once(loop, requests(("late", None, "late"))))
        assert found == said(run_at_once(fresh, requests((content, None, content))))
        loop.control(UnloadAdapter("late"))


@pytest.mark.parametrize("keeps_weights", LEVELS)
@pytest.mark.parametrize("options", WAYS)
def test_answers_after_a_sleep_are_those_before(
    make_loop: MakeLoop, captures: list[None], options: Mapping[str, Any], *, keeps_weights: bool
) -> None:
    same = said if options.get("batch_invariant") else tokens
    loop = make_loop(enable_sleep=True, **options)
    expected, num_captured = same(run_at_once(loop, requests())), len(captures)
    for _ in range(3):
        loop.control(Sleep(keeps_weights=keeps_weights))
        assert loop.stats().state is EngineState.ASLEEP
        loop.control(Wake())
        assert same(run_at_once(loop, requests())) == expected
    assert len(captures) == num_captured
    loop.scheduler.check_integrity()


@pytest.mark.whole_gpu
@pytest.mark.parametrize("keeps_weights", LEVELS)
def test_each_gpu_gives_its_memory_back(make_loop: MakeLoop, *, keeps_weights: bool) -> None:
    before = used_bytes()
    num_blocks, bytes_of_block = 1 << 15, 2 * 3 * 2 * 16 * 128  # of one of two KV heads
    loop = make_loop(enable_sleep=True, num_blocks=num_blocks)
    for _ in range(2):
        run_at_once(loop, requests())
        awake = used_bytes()
        loop.control(Sleep(keeps_weights=keeps_weights))
        asleep = used_bytes()
        for rank in range(RANKS):
            assert awake[rank] - asleep[rank] > num_blocks * bytes_of_block
            assert asleep[rank] - before[rank] < ASLEEP_BYTES + NCCL_BYTES
        loop.control(Wake())
        assert max(abs(one - other) for one, other in zip(used_bytes(), awake, strict=True)) < bytes_of_block << 13


@pytest.mark.parametrize("keeps_weights", LEVELS)
def test_requests_in_flight_go_on_after_the_sleep(make_loop: MakeLoop, *, keeps_weights: bool) -> None:
    loop = make_loop(enable_sleep=True, batch_invariant=True)
    expected = tokens(run_at_once(loop, requests(max_tokens=40)))
    events = [event for request in requests(max_tokens=40) for event in loop.submit(request)]
    for _ in range(9):
        events += loop.step()
    events += loop.control(Sleep(keeps_weights=keeps_weights))
    events += loop.control(Wake())
    while loop.busy:
        events += loop.step()
    found: dict[int, Answer] = {}
    for event in events:
        found.setdefault(event.request_id, Answer()).take(event)
    assert tokens(found) == expected


@pytest.mark.parametrize("options", WAYS)
def test_answers_after_an_update_are_those_of_a_fresh_engine(
    make_loop: MakeLoop, captures: list[None], options: Mapping[str, Any]
) -> None:
    fresh = tokens(run_at_once(make_loop("new", **options), requests()))
    loop = make_loop("old", enable_sleep=True, **options)
    before, num_captured = tokens(run_at_once(loop, requests())), len(captures)
    assert before != fresh
    for _ in range(2):
        loop.control(UpdateWeights(path="new"))
        assert tokens(run_at_once(loop, requests())) == fresh
    loop.control(Sleep())
    loop.control(Wake())
    assert tokens(run_at_once(loop, requests())) == fresh
    assert len(captures) == num_captured


def test_rank_that_dies_asleep_ends_the_engine_by_name(make_loop: MakeLoop) -> None:
    loop = make_loop(enable_sleep=True)
    run_at_once(loop, requests(("one",)))
    loop.control(Sleep())
    assert isinstance(loop.runner, ProcessRunner)
    os.kill(loop.runner.process_ids[0], signal.SIGKILL)
    with pytest.raises(GroupBroken, match="rank 1 has died"):
        loop.control(Wake())
