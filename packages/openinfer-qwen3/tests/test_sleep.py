"""Engines that sleep: memory given back, the same answers afterwards, no request lost."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from lifecycle_models import CPU_CONFIG, LEVELS, RANKS, SMALL, MakeLoop, opened_loops
from safetensors.numpy import save_file

from openinfer_core import (
    EngineCapability,
    EngineClosed,
    Failed,
    FailureKind,
    Finished,
    GenerateRequest,
    Refused,
    RequestId,
    SamplingParams,
    Tokens,
)
from openinfer_core.control import InFlight, Pause, Resume, Sleep, UpdateWeights, Wake
from openinfer_core.engine import EngineState
from openinfer_core.shared_weights import SharedTensor, SharedWeights
from openinfer_engine import EngineOptions, StepLoop
from openinfer_engine.errors import GroupBroken
from openinfer_engine.options import LoadFormat, LoopHost
from openinfer_engine.testing import Answer, random_requests, random_weights
from openinfer_engine.testing.answers import run_at_once
from openinfer_qwen3.family import Qwen3, Qwen3Definition

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is given back on Linux")

CONFIG = CPU_CONFIG | {"tie_word_embeddings": True}


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(random_weights(Qwen3Definition(), CONFIG), folder / "model.safetensors")
    return folder


@pytest.fixture
def make_loop(model_dir: Path) -> Iterator[MakeLoop]:
    with opened_loops() as opened:
        yield lambda **options: opened(model_dir, **{**SMALL, **options})


def requests(count: int = 4) -> list[GenerateRequest]:
    return random_requests(count, vocab_size=CONFIG["vocab_size"], max_prompt_tokens=40, logprobs=2)


def one(request_id: int, *, max_tokens: int = 12) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0)
    return GenerateRequest(request_id=RequestId(request_id), prompt_token_ids=tuple(range(41)), sampling=sampling)


def run(loop: StepLoop, events: list) -> dict[int, Answer]:
    while loop.busy:
        events = events + loop.step()
    found: dict[int, Answer] = {}
    for event in events:
        found.setdefault(event.request_id, Answer()).take(event)
    return found


def tokens(answers: Mapping[int, Answer]) -> dict[int, tuple[list[int], list[float]]]:
    return {key: (each.token_ids, [one.logprob for one in each.logprobs]) for key, each in answers.items()}


@pytest.mark.parametrize("keeps_weights", LEVELS)
@pytest.mark.parametrize("ranks", RANKS)
def test_answers_after_a_sleep_are_those_before(
    make_loop: MakeLoop, ranks: Mapping[str, object], keeps_weights: bool
) -> None:
    loop = make_loop(**ranks)
    assert EngineCapability.SLEEP in loop.info.capabilities
    expected = tokens(run_at_once(loop, requests()))
    for _ in range(3):
        assert loop.control(Sleep(keeps_weights=keeps_weights)) == []
        assert loop.stats().state is EngineState.ASLEEP
        assert not loop.busy
        loop.control(Wake())
        assert tokens(run_at_once(loop, requests())) == expected
    stats = loop.stats()
    assert (stats.state, stats.sleeps, stats.weights_version) == (EngineState.SERVING, 3, "")
    loop.scheduler.check_integrity()


@pytest.mark.parametrize("keeps_weights", LEVELS)
def test_requests_in_flight_go_on_after_the_sleep(make_loop: MakeLoop, keeps_weights: bool) -> None:
    loop = make_loop()
    expected = run(loop, loop.submit(one(1, max_tokens=20)))[1].token_ids
    events = loop.submit(one(2, max_tokens=20))
    for _ in range(6):
        events += loop.step()
    assert 2 < sum(len(event.token_ids) for event in events if isinstance(event, Tokens)) < 20
    events += loop.control(Sleep(keeps_weights=keeps_weights))
    (refused,) = loop.submit(one(3))
    assert isinstance(refused, Failed)
    assert refused.kind is FailureKind.UNAVAILABLE
    assert loop.step() == []
    events += loop.control(Wake())
    assert run(loop, events)[2].token_ids == expected


def test_requests_in_flight_end_where_that_is_asked(make_loop: MakeLoop) -> None:
    loop = make_loop()
    events = loop.submit(one(1)) + loop.step() + loop.step()
    events += loop.control(Sleep(requests=InFlight.ABORT))
    loop.control(Wake())
    assert run(loop, events)[1].finished is not None
    assert loop.stats().blocks_used == 0


def test_commands_twice_do_nothing(make_loop: MakeLoop) -> None:
    loop = make_loop()
    loop.control(Wake())
    loop.control(Sleep())
    loop.control(Sleep(keeps_weights=False))
    with pytest.raises(Refused, match="asleep"):
        loop.control(UpdateWeights(segments=("nothing",)))
    loop.control(Wake())
    loop.control(Wake())
    assert loop.stats().sleeps == 1
    assert run(loop, loop.submit(one(1)))[1].finished is not None


@pytest.mark.parametrize("ranks", RANKS)
def test_level_1_keeps_weights_whose_folder_is_removed(
    make_loop: MakeLoop, model_dir: Path, ranks: Mapping[str, object]
) -> None:
    loop = make_loop(**ranks)
    expected = tokens(run_at_once(loop, requests()))
    loop.control(Sleep())
    shutil.rmtree(model_dir)
    loop.control(Wake())
    assert tokens(run_at_once(loop, requests())) == expected
    with pytest.raises(Refused, match="has changed since its weights were read"):
        loop.control(Sleep())


def test_level_1_whose_files_are_written_to_loses_its_weights(make_loop: MakeLoop, model_dir: Path) -> None:
    loop = make_loop()
    events = loop.submit(one(1)) + loop.step()
    events += loop.control(Sleep())
    with (model_dir / "model.safetensors").open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"1234")
    # Whatever the file system's clock can tell apart: the write is later than the folder was made.
    os.utime(model_dir / "model.safetensors", ns=(1, 1))
    with pytest.raises(Refused, match="was written to while the engine slept"):
        loop.control(Wake())
    assert loop.stats().state is EngineState.WITHOUT_WEIGHTS
    while loop.busy:
        events += loop.step()
    (failure,) = [event for event in events if isinstance(event, Failed)]
    assert failure.kind is FailureKind.UNAVAILABLE


def test_level_2_reads_other_weights_as_such(make_loop: MakeLoop, model_dir: Path) -> None:
    loop = make_loop()
    before = tokens(run_at_once(loop, requests()))
    loop.control(Sleep(keeps_weights=False))
    weights = random_weights(Qwen3Definition(), CONFIG)
    weights = {name: each * 1.5 if each.ndim > 1 else each for name, each in weights.items()}
    save_file(weights, model_dir / "model.safetensors")
    loop.control(Wake())
    stats = loop.stats()
    assert stats.state is EngineState.SERVING
    assert stats.weights_version.startswith("drawn ")
    assert tokens(run_at_once(loop, requests())) == tokens(run_at_once(make_loop(), requests())) != before


def test_wake_that_cannot_read_stays_asleep_and_can_be_tried_again(make_loop: MakeLoop, model_dir: Path) -> None:
    loop = make_loop()
    expected = tokens(run_at_once(loop, requests()))
    loop.control(Sleep(keeps_weights=False))
    aside = model_dir.rename(model_dir.parent / "aside")
    for _ in range(2):
        with pytest.raises(Refused):
            loop.control(Wake())
        assert loop.stats().state is EngineState.ASLEEP
    aside.rename(model_dir)
    loop.control(Wake())
    assert tokens(run_at_once(loop, requests())) == expected


def test_level_1_of_a_folder_that_has_changed_is_refused_and_the_engine_serves_on(
    make_loop: MakeLoop, model_dir: Path
) -> None:
    loop = make_loop()
    shutil.copy(model_dir / "model.safetensors", model_dir.parent / "copy")
    os.replace(model_dir.parent / "copy", model_dir / "model.safetensors")
    events = loop.submit(one(1)) + loop.step()
    with pytest.raises(Refused, match="has changed since its weights were read"):
        loop.control(Sleep())
    assert run(loop, events)[1].finished is not None


def test_weights_of_shared_memory_are_not_kept(make_loop: MakeLoop) -> None:
    loop = make_loop()
    weights = random_weights(Qwen3Definition(), CONFIG)
    tensors = {name: SharedTensor("F32", each.shape, each.data) for name, each in weights.items()}
    expected = tokens(run_at_once(loop, requests()))
    with SharedWeights(tensors) as shared:
        loop.control(UpdateWeights(segments=shared.names))
        with pytest.raises(Refused, match="in no file"):
            loop.control(Sleep())
        loop.control(Sleep(keeps_weights=False))
        loop.control(Wake())
        assert loop.stats().state is EngineState.WITHOUT_WEIGHTS
        loop.control(UpdateWeights(segments=shared.names))
    assert tokens(run_at_once(loop, requests())) == expected


def test_dummy_weights_are_made_again(make_loop: MakeLoop) -> None:
    loop = make_loop(load_format=LoadFormat.DUMMY)
    expected = tokens(run_at_once(loop, requests()))
    for keeps_weights in (True, False):
        loop.control(Sleep(keeps_weights=keeps_weights))
        loop.control(Wake())
        assert tokens(run_at_once(loop, requests())) == expected


def test_pool_is_forgotten_and_disk_tier_is_not(make_loop: MakeLoop, tmp_path: Path) -> None:
    pytest.importorskip("openinfer_kv_offload")
    plain, tiered = make_loop(), make_loop(kv_tier=[f"disk={tmp_path / 'kv'},64MiB"], kv_load_timeout_ms=60_000)
    for loop, cached_tokens in ((plain, 0), (tiered, 40)):
        first = run(loop, loop.submit(one(1)))[1]
        loop.control(Sleep())
        loop.control(Wake())
        again = run(loop, loop.submit(one(2)))[2]
        assert again.cached_tokens == cached_tokens
        assert again.token_ids == first.token_ids


def test_blocks_whose_saves_end_in_a_pause_are_given_back_without_a_further_request(make_loop: MakeLoop) -> None:
    pytest.importorskip("openinfer_kv_offload")
    loop = make_loop(kv_tier=["host=16MiB"])
    events = loop.submit(one(1, max_tokens=1))
    while not any(isinstance(event, Finished) for event in events):
        events += loop.step()
    loop.control(Pause())
    assert loop.stats().blocks_used > 0, "nothing is being saved"
    run(loop, [])
    loop.control(Resume())
    run(loop, [])
    assert loop.stats().blocks_used == 0


def test_rank_that_dies_asleep_ends_the_engine_by_name(make_loop: MakeLoop) -> None:
    loop = make_loop(tensor_parallel_size=2, rank_host="process")
    loop.control(Sleep())
    (process_id,) = loop.runner.process_ids
    os.kill(process_id, signal.SIGKILL)
    with pytest.raises(GroupBroken, match="rank 1 has died"):
        loop.control(Wake())
    assert loop.busy
    with pytest.raises(GroupBroken, match="rank 1 has died"):
        loop.step()


def test_engine_process_that_dies_asleep_is_noticed(model_dir: Path) -> None:
    options = EngineOptions(num_blocks=64, max_num_seqs=4, engine_host=LoopHost.PROCESS)

    async def live() -> None:
        engine = Qwen3().launch(model_dir, options)
        try:
            await engine.control(Sleep())
            assert (await engine.stats()).state is EngineState.ASLEEP
            os.kill(engine.pid, signal.SIGKILL)
            with pytest.raises(EngineClosed):
                await engine.control(Wake())
        finally:
            await engine.close()

    asyncio.run(live())


def test_concurrent_wakes_are_all_answered(model_dir: Path) -> None:
    options = EngineOptions(num_blocks=64, max_num_seqs=4, engine_host=LoopHost.THREAD)

    async def live() -> None:
        engine = Qwen3().launch(model_dir, options)
        try:
            for _ in range(3):
                await engine.control(Sleep())
                await asyncio.gather(*(engine.control(Wake()) for _ in range(8)))
                assert (await engine.stats()).state is EngineState.SERVING
            assert (await engine.stats()).sleeps == 3
        finally:
            await engine.close()

    asyncio.run(live())


MEASURED = """
import ctypes, json, sys
from pathlib import Path
from openinfer_core import GenerateRequest, RequestId, SamplingParams
from openinfer_core.control import Sleep, Wake
from openinfer_core.process.resident import resident_bytes, return_freed_memory
from openinfer_engine import EngineOptions, build_loop, resolve
from openinfer_engine.options import LoadFormat
from openinfer_engine.testing.answers import run_at_once
from openinfer_qwen3.family import Qwen3Definition

return_freed_memory()  # as an engine's process does
# Of each heap's end glibc keeps 8 MiB then, which arrays of some 3 MB fill now and then: here it is to keep nothing.
ctypes.CDLL(None).mallopt(-1, 1 << 16)  # M_TRIM_THRESHOLD
options = EngineOptions(num_blocks=112, max_num_seqs=4, load_format=LoadFormat.DUMMY, grammar_compiler="none")
loop = build_loop(resolve(Qwen3Definition(), Path(sys.argv[1]), options))
memory, sizes = loop.info.memory_bytes, []
prompts = [tuple((7 * place + each) % 1000 for place in range(400)) for each in range(4)]
requests = [GenerateRequest(request_id=RequestId(each), prompt_token_ids=prompts[each],
            sampling=SamplingParams(max_tokens=2, temperature=0)) for each in range(4)]
found = []
for keeps in (True, False, True):
    found.append({key: each.token_ids for key, each in run_at_once(loop, requests).items()})
    sizes.append(resident_bytes())
    loop.control(Sleep(keeps_weights=keeps))
    sizes.append(resident_bytes())
    loop.control(Wake())
loop.close()
assert found[0] == found[1] == found[2]
print(json.dumps([memory, sizes]))
"""


def test_memory_of_weights_and_kv_is_given_back(tmp_path: Path) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6, "vocab_size": 32768, "head_dim": 64}
    limits = {"max_position_embeddings": 4096, "num_attention_heads": 8, "num_key_value_heads": 8}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | sizes | limits))
    said = subprocess.run(
        [sys.executable, "-c", MEASURED, str(tmp_path)], check=True, stdout=subprocess.PIPE, timeout=600
    )
    memory, (*resident,) = json.loads(said.stdout)
    held = memory["weights"] + memory["kv_cache"]
    assert held > 200 << 20
    given_back = [awake - asleep for awake, asleep in zip(resident[::2], resident[1::2], strict=True)]
    assert min(given_back) > 0.9 * held, (memory, resident)
    assert max(resident[1::2]) < 1.1 * min(resident[1::2]), "each sleep leaves the same"
