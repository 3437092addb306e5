"""Adapters that PEFT made of the tiny models, in a whole engine: what they change, and what they leave alone."""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from openinfer_core import (
    Failed,
    FailureKind,
    Finished,
    GenerateRequest,
    InvalidCheckpoint,
    Refused,
    RequestId,
    SamplingParams,
    TokenEvent,
)
from openinfer_core.control import LoadAdapter, UnloadAdapter
from openinfer_engine.engine_plan import resolve
from openinfer_engine.launch import build_loop
from openinfer_engine.loop import StepLoop
from openinfer_engine.options import EngineOptions
from openinfer_engine.testing.answers import Answer, run_at_once
from openinfer_engine.weights.safetensors_file import SafetensorsFile
from openinfer_qwen3.family import Qwen3Definition, Qwen3MoeDefinition

HERE = Path(__file__).parent
MODEL, ADAPTERS = HERE / "fixtures/tied", HERE / "adapters"
NAMES = ("patterns", "rank_1", "rank_40", "rank_8", "rslora_16")
LEAST_EFFECT = 0.05
"""Mean difference of log-probabilities below which an adapter might be ignored unseen."""
TOLERANCE = 2e-5


@contextmanager
def serving(*names: str, definition: Any = None, model: Path = MODEL, **options: Any) -> Iterator[StepLoop]:
    given = {"max_lora_rank": 40, "num_blocks": 48, "max_num_seqs": 8, "max_model_tokens": 128, **options}
    lora = [f"{name}={ADAPTERS / name}" for name in names]
    loop = build_loop(resolve(definition or Qwen3Definition(), model, EngineOptions(lora=lora, **given)))
    try:
        yield loop
    finally:
        loop.close()


def request(number: int, prompt: Sequence[int], lora: str | None = None, *, max_tokens: int = 2) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0, prompt_logprobs=0, logprobs=0)
    return GenerateRequest(request_id=RequestId(number), prompt_token_ids=tuple(prompt), lora=lora, sampling=sampling)


def recorded(folder: Path) -> tuple[list[int], NDArray[np.float64]]:
    """A prompt, and the log-probability of each of its tokens after the first, by transformers and PEFT."""
    with np.load(folder / "logits.npz") as found:
        ids, logits = found["token_ids"], found["logits"].astype(np.float64)
    logprobs = logits - logits.max(axis=-1, keepdims=True)
    logprobs -= np.log(np.exp(logprobs).sum(axis=-1, keepdims=True))
    return ids.tolist(), logprobs[np.arange(len(ids) - 1), ids[1:]]


def of_prompt(answer: Answer) -> NDArray[np.float64]:
    return np.array([each.logprob for each in answer.prompt_logprobs])


def of_everything(answer: Answer) -> tuple[list[int], list[float]]:
    scored = [*answer.prompt_logprobs, *answer.logprobs]
    return answer.token_ids, [each.logprob for each in scored]


def failures(events: list[TokenEvent]) -> list[Failed]:
    return [event for event in events if isinstance(event, Failed)]


def load(loop: StepLoop, command: LoadAdapter) -> str | None:
    """Why it was not loaded."""
    answers: list[str | None] = []
    assert loop.begin_control(command, answers.append)
    while not answers:
        loop.step()
    return answers[0]


@pytest.mark.parametrize(
    "options",
    [{}, {"tensor_parallel_size": 2}, {"max_step_tokens": 11}, {"batch_invariant": True}],
    ids=["one rank", "two ranks", "chunks", "batch-invariant"],
)
def test_five_adapters_and_none_in_one_batch_are_what_peft_computes(options: dict[str, Any]) -> None:
    with serving(*NAMES, max_loras=5, **options) as loop:
        asked = {name: recorded(ADAPTERS / name) for name in NAMES}
        requests = [request(2 * i, asked[name][0], name) for i, name in enumerate(NAMES)]
        requests += [request(2 * i + 1, asked[name][0]) for i, name in enumerate(NAMES)]
        answers = run_at_once(loop, requests)
    for i, name in enumerate(NAMES):
        adapted, plain = of_prompt(answers[2 * i]), of_prompt(answers[2 * i + 1])
        assert np.abs(adapted - asked[name][1]).max() < TOLERANCE, name
        assert np.abs(adapted - plain).mean() > LEAST_EFFECT, name


def test_adapters_of_a_mixtures_attention_are_what_peft_computes() -> None:
    model = HERE / "fixtures_moe/mixture"
    with serving("mixture", definition=Qwen3MoeDefinition(), model=model) as loop:
        prompt, expected = recorded(ADAPTERS / "mixture")
        answers = run_at_once(loop, [request(0, prompt, "mixture"), request(1, prompt)])
    assert np.abs(of_prompt(answers[0]) - expected).max() < TOLERANCE
    assert np.abs(of_prompt(answers[0]) - of_prompt(answers[1])).mean() > LEAST_EFFECT


def test_ranks_that_are_processes_hold_an_adapter_before_it_is_used(tmp_path: Path) -> None:
    shutil.copytree(ADAPTERS / "rank_8", tmp_path / "later")
    options = {"tensor_parallel_size": 2, "rank_host": "process", "lora_root": str(tmp_path), "max_loras": 2}
    with serving("rslora_16", **options) as loop:
        assert load(loop, LoadAdapter("later", "later")) is None
        for number, name, folder in ((0, "rslora_16", "rslora_16"), (1, "later", "rank_8")):
            prompt, expected = recorded(ADAPTERS / folder)
            answers = run_at_once(loop, [request(number, prompt, name)])
            assert np.abs(of_prompt(answers[number]) - expected).max() < TOLERANCE


def test_mixed_batch_is_each_request_alone_bit_for_bit_where_that_is_promised() -> None:
    rng = np.random.default_rng(5)
    requests = [
        request(i, rng.integers(0, 257, 9 + 5 * i).tolist(), name, max_tokens=6)
        for i, name in enumerate([*NAMES, None, "rank_8"])
    ]
    with serving(*NAMES, max_loras=5, batch_invariant=True) as loop:
        together = run_at_once(loop, requests)
    with serving(*NAMES, max_loras=5, batch_invariant=True, prefix_cache=False) as loop:
        for each in requests:
            alone = run_at_once(loop, [each])[each.request_id]
            assert of_everything(alone) == of_everything(together[each.request_id])


@pytest.mark.parametrize(
    "module",
    [f"layers.1.{part}_proj" for part in ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o")]
    + [f"layers.1.mlp.{part}_proj" for part in ("gate", "up", "down")],
)
def test_every_module_counts(tmp_path: Path, module: str, save: Callable[[Path, dict[str, Any]], None]) -> None:
    """Without one module of one layer the log-probabilities are others: none is ignored."""
    shutil.copytree(ADAPTERS / "rank_8", tmp_path / "less")
    file = SafetensorsFile(tmp_path / "less/adapter_model.safetensors")
    kept = {name: file.read(name) for name in file.tensors if module not in name}
    assert len(kept) == len(file.tensors) - 2
    save(tmp_path / "less/adapter_model.safetensors", kept)
    prompt, expected = recorded(ADAPTERS / "rank_8")
    with serving(lora_root=str(tmp_path), max_loras=1) as loop:
        assert load(loop, LoadAdapter("less", "less")) is None
        found = of_prompt(run_at_once(loop, [request(0, prompt, "less")])[0])
    assert np.abs(found - expected).max() > 100 * TOLERANCE


def test_preempted_requests_resume_with_their_adapter() -> None:
    rng = np.random.default_rng(6)
    names = ["rank_8", "patterns", None, "rank_1"]
    requests = [request(i, rng.integers(0, 257, 40).tolist(), name, max_tokens=40) for i, name in enumerate(names)]
    with serving(*NAMES, max_loras=4, batch_invariant=True) as loop:
        expected = run_at_once(loop, requests)
    with serving(*NAMES, max_loras=4, batch_invariant=True, num_blocks=14) as loop:
        found = run_at_once(loop, requests)
        assert loop.stats().preemptions > 0
    for number in expected:
        assert found[number].token_ids == expected[number].token_ids


def test_fewer_slots_than_adapters_serve_all_of_them() -> None:
    requests = [request(i, recorded(ADAPTERS / name)[0], name) for i, name in enumerate(NAMES * 2)]
    with serving(*NAMES, max_loras=2, lora_cache_bytes=0) as loop:
        answers = run_at_once(loop, requests)
    for i, name in enumerate(NAMES * 2):
        assert np.abs(of_prompt(answers[i]) - recorded(ADAPTERS / name)[1]).max() < TOLERANCE


def test_prefixes_are_shared_by_content_not_by_name(tmp_path: Path) -> None:
    """Two names of one content share KV; the same tensors with another alpha share none, nor does a name used again."""
    for name in ("one", "same", "other"):
        shutil.copytree(ADAPTERS / "rank_8", tmp_path / name)
    config = tmp_path / "other/adapter_config.json"
    config.write_text(config.read_text().replace('"lora_alpha": 8', '"lora_alpha": 12'))
    prompt = list(range(1, 65))
    with serving(lora_root=str(tmp_path), max_loras=3) as loop:
        for name in ("one", "same", "other"):
            assert load(loop, LoadAdapter(name, name)) is None
        ask = lambda number, name: run_at_once(loop, [unscored(number, prompt, name)])[number]  # noqa: E731
        assert ask(0, "one").cached_tokens == 0
        assert ask(1, "one").cached_tokens == ask(2, "same").cached_tokens == 48
        assert ask(3, "other").cached_tokens == 0
        assert ask(4, None).cached_tokens == 0
        assert load(loop, LoadAdapter("one", "other", in_place=True)) is None
        again = ask(5, "one")
        assert again.cached_tokens == 48  # what "other" has computed
        assert again.token_ids == ask(6, "other").token_ids


def unscored(number: int, prompt: Sequence[int], lora: str | None, *, max_tokens: int = 4) -> GenerateRequest:
    """Prompts whose log-probabilities are asked for are computed whole."""
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0)
    return GenerateRequest(request_id=RequestId(number), prompt_token_ids=tuple(prompt), lora=lora, sampling=sampling)


def test_kv_of_other_weights_under_one_name_is_not_found_in_a_tier_after_a_restart(tmp_path: Path) -> None:
    folder, prompt = tmp_path / "adapter", list(range(1, 65))
    tier = {"kv_tier": [f"disk={tmp_path / 'kv'},64MiB"]}
    found: dict[str, tuple[int, list[int]]] = {}
    for number, source in enumerate(("rank_8", "rank_8", "rank_1")):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(ADAPTERS / source, folder)
        options = EngineOptions(
            lora=[f"tuned={folder}"], num_blocks=48, max_num_seqs=4, max_model_tokens=128, max_lora_rank=8, **tier
        )
        loop = build_loop(resolve(Qwen3Definition(), MODEL, options))
        try:
            answer = run_at_once(loop, [unscored(0, prompt, "tuned")])[0]
        finally:
            loop.close()
        found[f"{number} {source}"] = answer.cached_tokens, answer.token_ids
    assert found["0 rank_8"][0] == 0
    assert found["1 rank_8"] == (48, found["0 rank_8"][1])
    assert found["2 rank_1"][0] == 0


def test_requests_that_wait_for_an_unloaded_adapter_end_and_the_one_that_runs_goes_on() -> None:
    prompt = recorded(ADAPTERS / "rank_8")[0]
    with serving("rank_8", "rank_1", max_loras=1) as loop:
        expected = run_at_once(loop, [request(0, prompt, "rank_8", max_tokens=20)])[0]
        events = loop.submit(request(1, prompt, "rank_8", max_tokens=20))
        events += loop.step() + loop.submit(request(2, prompt, "rank_1")) + loop.submit(request(3, prompt))
        events += loop.control(UnloadAdapter("rank_1"))
        events += loop.control(UnloadAdapter("rank_8"))
        ended = {each.request_id: each for each in failures(events)}
        assert ended.keys() == {2}
        assert ended[RequestId(2)].kind is FailureKind.NOT_FOUND
        answer = Answer()
        while loop.busy:
            for event in loop.step():
                if event.request_id == 1:
                    answer.take(event)
        for event in events:
            if event.request_id == 1:
                answer.take(event)
        assert len(answer.token_ids) == len(expected.token_ids)
        assert failures(loop.submit(request(4, prompt, "rank_8")))[0].kind is FailureKind.NOT_FOUND
        assert run_at_once(loop, [request(5, prompt)])[5].finished is not None
        assert not loop.stats().adapters


def test_adapter_of_a_tenant_is_not_there_for_others(tmp_path: Path) -> None:
    shutil.copytree(ADAPTERS / "rank_8", tmp_path / "own")
    prompt = recorded(ADAPTERS / "rank_8")[0]
    with serving(lora_root=str(tmp_path), max_loras=1) as loop:
        assert load(loop, LoadAdapter("own", "own", tenants=("gold",))) is None
        for number, tenant in enumerate(("", "silver")):
            asked = GenerateRequest(
                request_id=RequestId(number),
                prompt_token_ids=tuple(prompt),
                lora="own",
                tenant=tenant,
                sampling=SamplingParams(max_tokens=1),
            )
            assert failures(loop.submit(asked))[0].kind is FailureKind.NOT_FOUND
        theirs = GenerateRequest(
            request_id=RequestId(9),
            prompt_token_ids=tuple(prompt),
            lora="own",
            tenant="gold",
            sampling=SamplingParams(max_tokens=1),
        )
        assert run_at_once(loop, [theirs])[9].finished is not None


def test_adapter_whose_folder_has_changed_fails_its_requests_and_nothing_else(tmp_path: Path) -> None:
    """It was dropped from host memory, and what is read again is another one."""
    for name in ("rank_8", "rank_1"):
        shutil.copytree(ADAPTERS / name, tmp_path / name)
    prompt = recorded(ADAPTERS / "rank_8")[0]
    with serving(lora_root=str(tmp_path), max_loras=1, lora_cache_bytes=0) as loop:
        for name in ("rank_8", "rank_1"):
            assert load(loop, LoadAdapter(name, name)) is None
        shutil.copytree(ADAPTERS / "patterns", tmp_path / "rank_8", dirs_exist_ok=True)
        events = loop.submit(request(0, prompt, "rank_8"))
        while loop.busy:
            events += loop.step()
        assert [each.kind for each in failures(events)] == [FailureKind.INTERNAL]
        assert run_at_once(loop, [request(1, prompt, "rank_1")])[1].finished is not None


def test_adapters_are_refused_at_the_start_by_what_is_wrong_with_them() -> None:
    with pytest.raises(Refused, match="rank 40; this engine was started for at most 16"):
        resolve(Qwen3Definition(), MODEL, EngineOptions(lora=[f"a={ADAPTERS / 'rank_40'}"]))
    with pytest.raises(InvalidCheckpoint, match=r"adapter_config\.json cannot be read"):
        resolve(Qwen3Definition(), MODEL, EngineOptions(lora=[f"a={MODEL}"]))


def test_plan_counts_the_slots_and_names_the_adapters() -> None:
    plan = resolve(Qwen3Definition(), MODEL, EngineOptions(lora=[f"a={ADAPTERS / 'rank_8'}"], max_loras=3)).plan()
    # 3 layers; in and out of q, k, v, o, gate, up, down: 288 + 2 * 160 + 288 + 3 * 256; rank 16; float32
    assert plan.memory_bytes["lora"] == 3 * 16 * 3 * (288 + 320 + 288 + 768) * 4
    assert plan.parts["adapter a"].startswith("rank 8, content ")


@pytest.fixture
def save() -> Callable[[Path, dict[str, Any]], None]:
    """Writes tensors of BF16, as their bits."""

    def written(path: Path, tensors: dict[str, NDArray[np.uint16]]) -> None:
        header: dict[str, Any] = {}
        begin = 0
        for name, array in tensors.items():
            header[name] = {"dtype": "BF16", "shape": array.shape, "data_offsets": [begin, begin + array.nbytes]}
            begin += array.nbytes
        encoded = json.dumps(header).encode()
        data = b"".join(array.tobytes() for array in tensors.values())
        path.unlink()
        path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)

    return written


def test_many_loads_and_unloads_under_traffic_lose_no_request_and_hold_nothing(tmp_path: Path) -> None:
    """Each turn loads a name, asks for one that is there or was just unloaded, and unloads another."""
    for name in NAMES:
        shutil.copytree(ADAPTERS / name, tmp_path / name)
    rng = np.random.default_rng(7)
    ended: dict[int, TokenEvent] = {}
    answers: list[str | None] = []
    known: list[str] = []
    with serving(lora_root=str(tmp_path), max_loras=2, lora_cache_bytes=1 << 18, num_blocks=96) as loop:

        def take(events: list[TokenEvent]) -> None:
            ended.update({each.request_id: each for each in events if isinstance(each, Failed | Finished)})

        for turn in range(40):
            loop.begin_control(LoadAdapter(f"adapter-{turn}", NAMES[turn % len(NAMES)]), answers.append)
            known.append(f"adapter-{turn}")
            lora = known[int(rng.integers(0, len(known)))] if rng.random() < 0.8 else None
            take(loop.submit(unscored(turn, rng.integers(0, 250, 12).tolist(), lora)))
            for _ in range(3):
                take(loop.step())
            if len(known) > 5 and len(answers) > turn - 4:
                take(loop.control(UnloadAdapter(known.pop(0))))
        while loop.busy:
            take(loop.step())
        assert answers == [None] * 40
        assert len(ended) == 40
        kinds = {each.kind for each in ended.values() if isinstance(each, Failed)}
        assert kinds <= {FailureKind.NOT_FOUND}
        assert sum(isinstance(each, Finished) for each in ended.values()) > 10
        for name in known:
            take(loop.control(UnloadAdapter(name)))
        assert not loop.stats().adapters
