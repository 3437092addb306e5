"""Weights that are replaced while an engine runs: what is answered afterwards is what a fresh engine answers."""

import importlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np
import pytest
from lifecycle_models import CPU_CONFIG as CONFIG
from lifecycle_models import RANKS, SMALL, MakeLoop, Weights, changed, opened_loops, write_model
from numpy.typing import NDArray

from openinfer_core import (
    EngineCapability,
    Failed,
    FailureKind,
    Finished,
    FinishReason,
    GenerateRequest,
    InvalidCheckpoint,
    Refused,
    RequestId,
    SamplingParams,
    TokenEvent,
    TokenLogprobs,
    Tokens,
)
from openinfer_core.control import (
    IPC_HANDLE_BYTES,
    DeviceTensor,
    FlushCache,
    InFlight,
    Pause,
    Resume,
    Sleep,
    UpdateWeights,
    Wake,
)
from openinfer_core.engine import EngineState
from openinfer_core.shared_weights import SharedTensor, SharedWeights, content_hash
from openinfer_engine import EngineOptions, StepLoop, build_loop, resolve
from openinfer_engine.cpu.backend import CpuBackend
from openinfer_engine.testing import Answer, random_requests, random_weights
from openinfer_engine.testing.answers import run_at_once
from openinfer_engine.testing.quantised_checkpoints import SCHEMES, write_quantised, write_safetensors
from openinfer_engine.testing.quantised_family import projections
from openinfer_engine.weights.checkpoint import Checkpoint
from openinfer_qwen3.family import Qwen3Definition


@pytest.fixture(scope="module")
def old_weights() -> Weights:
    return random_weights(Qwen3Definition(), CONFIG)


@pytest.fixture(scope="module")
def new_weights(old_weights: Weights) -> Weights:
    return changed(old_weights, seed=1)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Of all updates."""
    return tmp_path / "root"


@pytest.fixture
def old(root: Path, tmp_path: Path, old_weights: Weights) -> Path:
    root.mkdir()
    return write_model(tmp_path / "old", old_weights, CONFIG)


@pytest.fixture
def new(root: Path, old: Path, new_weights: Weights) -> Path:
    return write_model(root / "new", new_weights, CONFIG)


@pytest.fixture
def make_loop(root: Path) -> Iterator[MakeLoop]:
    with opened_loops() as opened:
        yield lambda folder, **options: opened(folder, **{"weights_root": str(root), **SMALL, **options})


def requests(count: int = 4, **more: object) -> list[GenerateRequest]:
    return random_requests(count, vocab_size=CONFIG["vocab_size"], max_prompt_tokens=40, logprobs=2, **more)


def one(request_id: int, prompt: tuple[int, ...], *, max_tokens: int = 12, **sampling: object) -> GenerateRequest:
    params = SamplingParams(max_tokens=max_tokens, temperature=0, logprobs=0, **sampling)
    return GenerateRequest(request_id=RequestId(request_id), prompt_token_ids=prompt, sampling=params)


def run(loop: StepLoop, events: list[TokenEvent]) -> dict[int, Answer]:
    """To the end; of all requests that events speak of."""
    events = list(events)
    while loop.busy:
        events += loop.step()
    found: dict[int, Answer] = {}
    for event in events:
        found.setdefault(event.request_id, Answer()).take(event)
    return found


def bits(logprobs: list[TokenLogprobs]) -> list[tuple[float, int]]:
    return [(each.logprob, each.rank) for each in logprobs]


def tokens(answers: Mapping[int, Answer]) -> dict[int, tuple[list[int], list[tuple[float, int]]]]:
    """What was sampled, and how likely it was; not what was found in a cache."""
    return {key: (each.token_ids, bits(each.logprobs)) for key, each in answers.items()}


@pytest.mark.parametrize("ranks", RANKS)
def test_answers_after_an_update_are_those_of_a_fresh_engine(
    make_loop: MakeLoop, old: Path, new: Path, ranks: Mapping[str, object]
) -> None:
    loop, fresh = make_loop(old, **ranks), make_loop(new, **ranks)
    assert EngineCapability.UPDATE_WEIGHTS in loop.info.capabilities
    before = run_at_once(loop, requests())
    assert loop.control(UpdateWeights(path="new")) == []
    after, expected = run_at_once(loop, requests()), run_at_once(fresh, requests())
    assert after == expected
    assert before != after, "the new weights must make a difference, or this test shows nothing"
    stats = loop.stats()
    assert (stats.state, stats.weight_updates, stats.failed_weight_updates) == (EngineState.SERVING, 1, 0)


def test_update_from_shared_memory_is_that_from_a_folder(
    make_loop: MakeLoop, old: Path, new: Path, new_weights: Weights
) -> None:
    ranks = {"tensor_parallel_size": 2, "rank_host": "process"}
    loop = make_loop(old, **ranks)
    tensors = {name: SharedTensor("F32", each.shape, each.data) for name, each in new_weights.items()}
    with SharedWeights(tensors, segment_bytes=50_000) as shared:
        assert len(shared.names) > 1
        loop.control(UpdateWeights(segments=shared.names, content_hash=content_hash(tensors)))
        names = shared.names
    assert not [name for name in names if Path("/dev/shm", name).exists()]
    assert run_at_once(loop, requests()) == run_at_once(make_loop(new, **ranks), requests())
    assert loop.stats().weights_version == f"content {content_hash(tensors)}"


class GpuOfOthers(CpuBackend):
    """A CPU's, and memory of another process by handles, as a GPU's backend opens it."""

    def __init__(self, options: EngineOptions, memory: Mapping[bytes, NDArray[np.uint8]]) -> None:
        super().__init__(options)
        self._memory = memory
        self.num_open = 0

    def open_foreign(self, handle: bytes) -> "Allocation":
        if handle not in self._memory:
            raise Refused("a CUDA IPC handle cannot be opened")
        self.num_open += 1
        return Allocation(self._memory[handle], self)


class Allocation:
    def __init__(self, values: NDArray[np.uint8], gpu: GpuOfOthers) -> None:
        self.size_bytes, self._values, self._gpu = values.size, values, gpu
        self.device_bytes = self.host_bytes = 0

    def read(self, offset_bytes: int, num_bytes: int) -> NDArray[np.uint8]:
        return self._values[offset_bytes : offset_bytes + num_bytes].copy()

    def copy_rows(self, offset_bytes: int, pitch_bytes: int, out: object) -> None:
        raise AssertionError("a CPU has no copy on a device")

    def close(self) -> None:
        self._gpu.num_open -= 1


@pytest.mark.parametrize("size", [1, 2])
def test_update_from_memory_of_a_gpu_is_that_from_a_folder(
    make_loop: MakeLoop, old: Path, new: Path, new_weights: Weights, size: int
) -> None:
    """Which is a CPU's here: the driver's calls alone are not made."""
    handle, offset, tensors, values = b"h" * IPC_HANDLE_BYTES, 100, [], [np.zeros(100, np.uint8)]
    for name, each in new_weights.items():
        tensors.append(DeviceTensor(name, "F32", each.shape, handle, offset))
        values.append(np.ascontiguousarray(each).view(np.uint8).reshape(-1))
        offset += values[-1].size
    options = EngineOptions(num_blocks=64, max_num_seqs=8, tensor_parallel_size=size, batch_invariant=True)
    gpu = GpuOfOthers(options, {handle: np.concatenate(values)})
    with closing(build_loop(resolve(Qwen3Definition(), old, options, backend=gpu))) as loop:
        before = run_at_once(loop, requests())
        beyond = msgspec.structs.replace(tensors[-1], offset_bytes=tensors[-1].offset_bytes + 1)
        for wrong, message in (
            (tensors[:-1], "is missing"),
            ([*tensors, DeviceTensor("more", "F32", (1,), handle)], "more"),
            ([*tensors[:-1], beyond], "in an allocation of"),
            ([*tensors[:-1], msgspec.structs.replace(tensors[-1], handle=b"0" * IPC_HANDLE_BYTES)], "cannot be opened"),
        ):
            with pytest.raises((InvalidCheckpoint, Refused), match=message):
                loop.control(UpdateWeights(tensors=tuple(wrong)))
            assert gpu.num_open == 0
        assert tokens(run_at_once(loop, requests())) == tokens(before)
        loop.control(UpdateWeights(tensors=tuple(tensors)))
        assert gpu.num_open == 0
        fresh = make_loop(new, tensor_parallel_size=size, block_size_tokens=options.block_size_tokens)
        assert run_at_once(loop, requests()) == run_at_once(fresh, requests())
        with pytest.raises(Refused, match="are in no file"):
            loop.control(Sleep())
        loop.control(Sleep(keeps_weights=False))
        loop.control(Wake())
        assert loop.stats().state is EngineState.WITHOUT_WEIGHTS
        loop.control(UpdateWeights(tensors=tuple(tensors)))
        assert tokens(run_at_once(loop, requests())) == tokens(run_at_once(fresh, requests()))


def test_engine_on_a_cpu_takes_no_handles(make_loop: MakeLoop, old: Path) -> None:
    loop = make_loop(old)
    before = run_at_once(loop, requests())
    with pytest.raises(Refused, match="an engine on a CPU takes no weights by CUDA IPC handles"):
        loop.control(UpdateWeights(tensors=(DeviceTensor("x", "F32", (1,), b"h" * IPC_HANDLE_BYTES),)))
    assert tokens(run_at_once(loop, requests())) == tokens(before)


def test_requests_in_flight_go_on_with_the_new_weights_as_if_all_had_been_computed_with_them(
    make_loop: MakeLoop, old: Path, new: Path
) -> None:
    loop, fresh = make_loop(old), make_loop(new)
    prompt = tuple(range(30))
    events = loop.submit(one(1, prompt, max_tokens=20))
    for _ in range(6):
        events += loop.step()
    events += loop.control(UpdateWeights(path="new"))
    said = [each for event in events if isinstance(event, Tokens) for each in event.token_ids]
    assert 3 < len(said) < 20
    answer = run(loop, events)[1]
    assert answer.token_ids[: len(said)] == said
    # The fresh engine is asked to go on after what the old weights had said.
    continued = run(fresh, fresh.submit(one(1, (*prompt, *said), max_tokens=20 - len(said))))[1]
    assert answer.token_ids[len(said) :] == continued.token_ids
    assert bits(answer.logprobs[len(said) :]) == bits(continued.logprobs)


def test_requests_in_flight_end_where_that_is_asked(make_loop: MakeLoop, old: Path, new: Path) -> None:
    loop = make_loop(old)
    events = loop.submit(one(1, tuple(range(30)), max_tokens=20)) + loop.step() + loop.step()
    events += loop.control(UpdateWeights(path="new", requests=InFlight.ABORT))
    ended = [event for event in events if isinstance(event, Finished)]
    assert [(event.request_id, event.reason) for event in ended] == [(1, FinishReason.ABORT)]
    assert not loop.busy


def test_no_kv_of_the_old_weights_is_found_and_that_of_the_new_is(make_loop: MakeLoop, old: Path, new: Path) -> None:
    loop = make_loop(old)
    prompt = tuple(range(40))
    events = loop.submit(one(1, prompt, max_tokens=30)) + loop.step() + loop.step()
    events += loop.control(UpdateWeights(path="new"))
    run(loop, events)
    # What was computed again after the update is shared, though the request came before it.
    assert run(loop, loop.submit(one(2, prompt)))[2].cached_tokens == 32
    loop.control(UpdateWeights(path="new"))
    assert run(loop, loop.submit(one(3, prompt)))[3].cached_tokens == 0


@pytest.mark.parametrize("ranks", RANKS)
def test_logprobs_while_generating_are_the_prompt_logprobs_of_the_same_tokens(
    make_loop: MakeLoop, old: Path, new: Path, ranks: Mapping[str, object]
) -> None:
    loop = make_loop(old, **ranks)
    for _ in range(2):  # with the weights that it began with, and after an update
        sampled = [
            GenerateRequest(
                request_id=RequestId(number),
                prompt_token_ids=tuple(range(number, number + 25)),
                sampling=SamplingParams(max_tokens=15, temperature=1.0, seed=number, logprobs=0),
            )
            for number in range(1, 5)
        ]
        answers = run_at_once(loop, sampled)
        for request in sampled:
            answer = answers[request.request_id]
            tokens = (*request.prompt_token_ids, *answer.token_ids)
            scoring = one(99, tokens, max_tokens=1, prompt_logprobs=0)
            scored = run(loop, loop.submit(scoring))[99]
            assert bits(scored.prompt_logprobs[-15:]) == bits(answer.logprobs)
        loop.control(UpdateWeights(path="new"))


def test_update_under_traffic_loses_no_request(make_loop: MakeLoop, old: Path, new: Path) -> None:
    loop, coming = make_loop(old), requests(12)
    answers = {request.request_id: Answer() for request in coming}

    def deliver(events: list[TokenEvent]) -> None:
        for event in events:
            answers[event.request_id].take(event)

    for number, request in enumerate(coming):
        deliver(loop.submit(request))
        deliver(loop.step())
        if number % 4 == 2:
            deliver(loop.control(UpdateWeights(path="new")))
            loop.scheduler.check_integrity()
    while loop.busy:
        deliver(loop.step())
    assert all(answer.finished is not None for answer in answers.values())
    assert [len(answers[each.request_id].token_ids) for each in coming] == [each.sampling.max_tokens for each in coming]
    assert tokens(run_at_once(loop, requests())) == tokens(run_at_once(make_loop(new), requests()))


def test_paused_engine_keeps_requests_and_goes_on(make_loop: MakeLoop, old: Path) -> None:
    loop, other = make_loop(old), make_loop(old)
    first, second = one(1, tuple(range(20))), one(2, tuple(range(5, 30)))
    expected = run_at_once(other, [first, second])
    events = loop.submit(first) + loop.step() + loop.step()
    events += loop.control(Pause())
    assert loop.stats().state is EngineState.PAUSED
    events += loop.submit(second)
    assert not loop.busy
    assert loop.reconcile(frozenset({first.request_id, second.request_id})) == []
    events += loop.control(FlushCache())  # other commands are obeyed meanwhile
    events += loop.control(Resume())
    assert tokens(run(loop, events)) == tokens(expected)


def test_update_while_paused_stays_paused(make_loop: MakeLoop, old: Path, new: Path) -> None:
    loop = make_loop(old)
    loop.control(Pause())
    loop.control(UpdateWeights(path="new"))
    assert loop.stats().state is EngineState.PAUSED
    loop.control(Resume())
    assert run_at_once(loop, requests()) == run_at_once(make_loop(new), requests())


# --- what is refused before anything has changed -----------------------------------------------------------


def drop_one(weights: dict[str, NDArray[np.float32]]) -> None:
    del weights["model.layers.1.mlp.up_proj.weight"]


def add_one(weights: dict[str, NDArray[np.float32]]) -> None:
    weights["model.layers.9.mlp.up_proj.weight"] = np.zeros((2, 2), np.float32)


def reshape_one(weights: dict[str, NDArray[np.float32]]) -> None:
    weights["model.norm.weight"] = np.ones(63, np.float32)


def retype_one(weights: dict[str, NDArray[np.float32]]) -> None:
    weights["model.norm.weight"] = np.ones(64, np.int32)


REFUSED = [
    pytest.param(drop_one, "model.layers.1.mlp.up_proj.weight is missing", id="missing"),
    pytest.param(add_one, "model.layers.9.mlp.up_proj.weight is not a tensor of this model", id="unknown"),
    pytest.param(reshape_one, r"model.norm.weight has shape \[63\], not \[64\]", id="shape"),
    pytest.param(retype_one, "model.norm.weight has dtype I32", id="dtype"),
]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_weights_that_do_not_fit_change_nothing(
    make_loop: MakeLoop, old: Path, root: Path, new_weights: Weights, ranks, change, message
) -> None:
    wrong = dict(new_weights)
    change(wrong)
    write_model(root / "wrong", wrong, CONFIG)
    loop, other = make_loop(old, **ranks), make_loop(old)
    events = loop.submit(one(1, tuple(range(30)))) + loop.step() + loop.step()
    with pytest.raises(Refused, match=message):
        loop.control(UpdateWeights(path="wrong"))
    answer = run(loop, events)[1]
    assert answer.token_ids == run(other, other.submit(one(1, tuple(range(30)))))[1].token_ids
    stats = loop.stats()
    assert (stats.weights_version, stats.preemptions, stats.failed_weight_updates) == ("", 0, 0)


def test_config_of_another_model_is_refused(make_loop: MakeLoop, old: Path, new: Path) -> None:
    (new / "config.json").write_text(json.dumps(CONFIG | {"rope_theta": 10000.0}))
    with pytest.raises(Refused, match="are not those of the model that runs"):
        make_loop(old).control(UpdateWeights(path="new"))


def test_folder_without_a_config_is_read_with_that_of_the_engine(make_loop: MakeLoop, old: Path, new: Path) -> None:
    fresh = make_loop(new)
    (new / "config.json").unlink()
    loop = make_loop(old)
    loop.control(UpdateWeights(path="new"))
    assert run_at_once(loop, requests()) == run_at_once(fresh, requests())


def test_folders_outside_of_the_root_are_refused(make_loop: MakeLoop, old: Path, new: Path, root: Path) -> None:
    loop = make_loop(old)
    (root / "link").symlink_to(old)
    for path in ("../old", str(old), "link", "link/../old", "new/../../old"):
        with pytest.raises(Refused, match="not below --weights-root"):
            loop.control(UpdateWeights(path=path))
    for path in ("nowhere", "new\0x"):
        with pytest.raises(Refused, match="cannot be found"):
            loop.control(UpdateWeights(path=path))
    (root / "half").mkdir()
    (root / "half" / "model.safetensors").symlink_to(old / "model.safetensors")
    with pytest.raises(Refused, match="a link that leads out of --weights-root"):
        loop.control(UpdateWeights(path="half"))
    (root / "half" / "model.safetensors").unlink()
    (root / "half" / "model.safetensors").symlink_to(new / "model.safetensors")  # within the root it may lead anywhere
    loop.control(UpdateWeights(path="half"))
    with pytest.raises(Refused, match="started without one"):
        make_loop(old, weights_root=None).control(UpdateWeights(path="new"))


def test_shared_memory_that_others_could_write_or_that_is_no_checkpoint_is_refused(
    make_loop: MakeLoop, old: Path, new_weights: Weights
) -> None:
    loop = make_loop(old)
    tensors = {name: SharedTensor("F32", each.shape, each.data) for name, each in new_weights.items()}
    with pytest.raises(Refused, match="cannot be opened"):
        loop.control(UpdateWeights(segments=("openinfer-nothing-there",)))
    with SharedWeights(tensors) as shared:
        (name,) = shared.names
        path = Path("/dev/shm", name)
        path.chmod(0o620)
        with pytest.raises(Refused, match="others may write to it"):
            loop.control(UpdateWeights(segments=(name,)))
        path.chmod(0o600)
        os.truncate(path, path.stat().st_size - 1)
        with pytest.raises(Refused, match="its tensors cover"):
            loop.control(UpdateWeights(segments=(name,)))
    assert loop.stats().state is EngineState.SERVING


# --- what fails afterwards ---------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", RANKS)
def test_failure_while_reading_leaves_no_weights_until_a_complete_update(
    make_loop: MakeLoop,
    old: Path,
    new: Path,
    root: Path,
    ranks: Mapping[str, object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fresh, loop = make_loop(new, **ranks), make_loop(old, **ranks)
    shutil.copytree(new, root / "damaged")
    weights, park = root / "damaged" / "model.safetensors", loop.park

    def cut_and_park() -> bool:
        """Cuts the file off after it was checked and before it is read."""
        os.truncate(weights, weights.stat().st_size // 2)
        return park()

    events = loop.submit(one(1, tuple(range(30)))) + loop.step() + loop.step()
    monkeypatch.setattr(loop, "park", cut_and_park)
    with pytest.raises(Refused, match="no weights"):
        loop.control(UpdateWeights(path="damaged"))
    monkeypatch.setattr(loop, "park", park)
    assert loop.stats().state is EngineState.WITHOUT_WEIGHTS
    while loop.busy:
        events += loop.step()
    (failure,) = [event for event in events if isinstance(event, Failed)]
    assert (failure.request_id, failure.kind) == (1, FailureKind.UNAVAILABLE)
    (refused,) = loop.submit(one(2, (1, 2, 3)))
    assert isinstance(refused, Failed)
    assert refused.kind is FailureKind.UNAVAILABLE
    loop.control(UpdateWeights(path="new"))
    stats = loop.stats()
    assert (stats.state, stats.weight_updates, stats.failed_weight_updates) == (EngineState.SERVING, 1, 1)
    assert run_at_once(loop, requests()) == run_at_once(fresh, requests())


# --- tiers, formats, drafters ------------------------------------------------------------------------------


def test_disk_tier_gives_kv_of_the_same_content_alone_also_after_a_restart(
    make_loop: MakeLoop, old: Path, new: Path, root: Path, new_weights: Weights, tmp_path: Path
) -> None:
    pytest.importorskip("openinfer_kv_offload")
    tier = {"kv_tier": [f"disk={tmp_path / 'kv'},64MiB"], "kv_load_timeout_ms": 60_000}
    prompt, known, other = tuple(range(41)), "a" * 64, "b" * 64

    def ask(loop: StepLoop, request_id: int) -> Answer:
        return run(loop, loop.submit(one(request_id, prompt)))[request_id]

    loop = make_loop(old, **tier)
    ask(loop, 1)
    loop.control(UpdateWeights(path="new", content_hash=known))
    first = ask(loop, 2)
    assert first.cached_tokens == 0, "KV of the old weights must not come back from the tier"
    loop.close()

    restarted = make_loop(old, **tier)
    assert ask(restarted, 1).cached_tokens == 40, "that of the weights it began with is there"
    restarted.control(UpdateWeights(path="new", content_hash=other))
    assert ask(restarted, 2).cached_tokens == 0
    restarted.control(UpdateWeights(path="new", content_hash=known))
    again = ask(restarted, 3)
    assert again.cached_tokens == 40
    assert again.token_ids == first.token_ids
    restarted.control(UpdateWeights(path="new"))
    assert ask(restarted, 4).cached_tokens == 0, "a number that was drawn is never used again"


def write_changed(source: Path, target: Path) -> None:
    """A copy of a BF16 checkpoint in which the last mantissa bits of all numbers are others."""
    shutil.copytree(source, target)
    with Checkpoint.open(source) as checkpoint:
        found = {name: (info.dtype, checkpoint.read(name) ^ 0x1F) for name, info in checkpoint.tensors.items()}
    (target / "model.safetensors").unlink()
    write_safetensors(target / "model.safetensors", found)


@pytest.mark.parametrize("scheme", ["w4a16", "fp8 blocks BF16"])
def test_quantised_weights_are_replaced_by_such_and_by_no_others(
    make_loop: MakeLoop, fixtures: Path, root: Path, tmp_path: Path, scheme: str
) -> None:
    source = fixtures / "tied"
    root.mkdir()
    write_quantised(source, tmp_path / "old", SCHEMES[scheme], projections(source))
    write_changed(source, tmp_path / "changed")
    write_quantised(tmp_path / "changed", root / "new", SCHEMES[scheme], projections(source))
    shutil.copytree(source, root / "plain")
    loop, fresh = make_loop(tmp_path / "old"), make_loop(root / "new")
    asked = random_requests(3, vocab_size=loop.info.num_token_ids, max_prompt_tokens=20, logprobs=1)
    before, expected = tokens(run_at_once(loop, asked)), tokens(run_at_once(fresh, asked))
    loop.control(UpdateWeights(path="new"))
    assert tokens(run_at_once(loop, asked)) == expected != before
    with pytest.raises(Refused):
        loop.control(UpdateWeights(path="plain"))
    assert tokens(run_at_once(loop, asked)) == expected


DRAFTER = """
OPENINFER_CONTRACT = 1
import numpy as np

class Echo:
    made = []
    max_drafts = 1

    def __init__(self, context):
        self.rows = context.ops.download(context.model.logits(context.ops.zeros((1, 64)) + 1))
        Echo.made.append((context.model_dir.name, float(self.rows[0, 0])))

    def start(self, starts):
        pass

    def draft(self, slots, last_ids, hidden, lengths):
        return last_ids.reshape(-1, 1).copy()
"""


def test_drafter_is_made_anew_on_the_new_model(
    make_loop: MakeLoop, old: Path, new: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    (site / "echo_drafter-1.0.dist-info").mkdir(parents=True)
    (site / "echo_drafter.py").write_text(DRAFTER)
    metadata = site / "echo_drafter-1.0.dist-info"
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: echo_drafter\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[openinfer.drafters]\necho = echo_drafter:Echo\n")
    monkeypatch.syspath_prepend(site)
    loop, fresh = make_loop(old, speculative="echo,k=1"), make_loop(new)
    loop.control(UpdateWeights(path="new"))
    made = importlib.import_module("echo_drafter").Echo.made
    assert [name for name, _ in made] == ["old", "new"]
    assert made[0][1] != made[1][1], "it must see the new model"
    assert tokens(run_at_once(loop, requests())) == tokens(run_at_once(fresh, requests()))
    stats = loop.stats()
    assert stats.spec_decode_num_draft_tokens > 0
    assert stats.drafter_faults == 0
