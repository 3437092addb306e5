"""Data-parallel attention with experts dealt out: the same answers as tensor parallel, in whatever company.

`test_equivalence.py` has random traffic with chunks, cached prefixes and preemptions.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from openinfer_core import EngineCapability, FinishReason, GenerateRequest, Refused, RequestId, SamplingParams
from openinfer_core.control import FlushCache, Pause
from openinfer_deepseek import DeepseekV2, DeepseekV3
from openinfer_deepseek.family import DeepseekV2Definition
from openinfer_deepseek.model import DeepseekModel
from openinfer_engine.data_parallel.launch import build_data_parallel_loop
from openinfer_engine.data_parallel.loop import DataParallelLoop
from openinfer_engine.engine_plan import resolve
from openinfer_engine.launch import build_loop
from openinfer_engine.options import EngineOptions, LoopHost
from openinfer_engine.scheduler import TokenBudgetScheduler
from openinfer_engine.testing import ask_launched, check_launched
from openinfer_engine.testing.answers import Answer, run_at_once
from openinfer_kv_cache import PrefixHasher

SIZES: dict[str, Any] = {"max_num_seqs": 8, "max_step_tokens": 64, "block_size_tokens": 8, "num_blocks": 200}


@pytest.fixture(scope="module")
def groups() -> Path:
    return Path(__file__).parent / "fixtures" / "groups"


@contextmanager
def data_parallel(model_dir: Path, ranks: int, **options: Any) -> Generator[DataParallelLoop]:
    asked = EngineOptions(**{**SIZES, "data_parallel_size": ranks, **options})
    loop = build_data_parallel_loop(resolve(DeepseekV2Definition(), model_dir, asked))
    try:
        yield loop
    finally:
        loop.close()


def tensor_parallel(model_dir: Path, ranks: int, requests: Sequence[GenerateRequest]) -> dict[int, Answer]:
    asked = EngineOptions(**{**SIZES, "tensor_parallel_size": ranks})
    loop = build_loop(resolve(DeepseekV2Definition(), model_dir, asked))
    try:
        return run_at_once(loop, requests)
    finally:
        loop.close()


def request(
    request_id: int, *, prompt: int, num_tokens: int, max_tokens: int = 12, seed: int | None = None
) -> GenerateRequest:
    """Prompts of one number begin alike."""
    rng = np.random.default_rng(prompt)
    return GenerateRequest(
        request_id=RequestId(request_id),
        prompt_token_ids=tuple(rng.integers(0, 100, num_tokens).tolist()),
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0 if seed is None else 1, seed=seed),
    )


def tokens_of(answers: dict[int, Answer]) -> dict[int, list[int]]:
    return {request_id: answer.token_ids for request_id, answer in answers.items()}


def test_ranks_remember_digests_together_with_the_router(groups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[PrefixHasher] = []
    monkeypatch.setattr(TokenBudgetScheduler, "share_digests", lambda _, hasher: told.append(hasher))
    with data_parallel(groups, 2):
        assert [each is told[0] for each in told] == [True, True]


@pytest.mark.parametrize("ranks", [2, 4])
def test_tokens_are_those_of_tensor_parallel_also_sampled_ones(groups: Path, ranks: int) -> None:
    """Uneven batches: long and short prompts, 1 to 40 tokens to generate, so ranks run dry at different times."""
    requests = [
        request(index, prompt=index, num_tokens=5 + 9 * index, max_tokens=1 + 5 * (index % 9), seed=index % 2 or None)
        for index in range(12)
    ]
    with data_parallel(groups, ranks) as loop:
        answers = run_at_once(loop, requests)
        assert loop.stats().blocks_used == 0
        worked = [each.stats().generated_tokens for each in loop.loops]
    assert all(worked)
    assert tokens_of(answers) == tokens_of(tensor_parallel(groups, 2, requests))


def test_a_rank_without_rows_joins_every_step(groups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    joined = list[DeepseekModel]()
    join_step = DeepseekModel.join_step

    def noted(model: DeepseekModel) -> None:
        joined.append(model)
        join_step(model)

    monkeypatch.setattr(DeepseekModel, "join_step", noted)
    asked = [request(1, prompt=3, num_tokens=70, max_tokens=9)]
    with data_parallel(groups, 2) as loop:
        answers = run_at_once(loop, asked)
        steps = sum(each.stats().steps for each in loop.loops)
        working = [each.stats().steps > 0 for each in loop.loops]
    assert working == [True, False]
    assert len(joined) == steps
    assert steps >= 9
    assert tokens_of(answers) == tokens_of(tensor_parallel(groups, 1, asked))


def test_a_cached_prefix_is_found_on_its_rank_and_another_goes_elsewhere(groups: Path) -> None:
    with data_parallel(groups, 2) as loop:
        run_at_once(loop, [request(1, prompt=1, num_tokens=120), request(2, prompt=2, num_tokens=120)])
        assert [each.stats().prompt_tokens for each in loop.loops] == [120, 120]
        again = [request(3, prompt=1, num_tokens=130), request(4, prompt=2, num_tokens=130)]
        answers = run_at_once(loop, again)
        assert [answers[each].cached_tokens for each in (3, 4)] == [120, 120]
        loop.control(FlushCache())
        assert run_at_once(loop, [request(5, prompt=1, num_tokens=130)])[5].cached_tokens == 0
    assert tokens_of(answers) == tokens_of(tensor_parallel(groups, 2, again))


@pytest.mark.parametrize("ranks", [2, 4])
def test_batch_invariant_answers_have_the_same_bits_on_every_rank(groups: Path, ranks: int) -> None:
    """Which rank has a request depends on the others."""
    sampling = SamplingParams(max_tokens=12, temperature=0, logprobs=0, prompt_logprobs=0)
    asked = [
        msgspec.structs.replace(request(index, prompt=1, num_tokens=40), sampling=sampling) for index in range(ranks)
    ]
    with data_parallel(groups, ranks, batch_invariant=True) as loop:
        for each in asked:
            loop.submit(each)
        assert {loop.rank_of(each.request_id) for each in asked} == set(range(ranks))
        answers = {each.request_id: Answer() for each in asked}
        while loop.busy:
            for event in loop.step():
                answers[event.request_id].take(event)
    first, *others = answers.values()
    assert len(first.prompt_logprobs) == 39
    for each in others:
        assert (each.token_ids, each.logprobs) == (first.token_ids, first.logprobs)
        assert each.prompt_logprobs == first.prompt_logprobs


def test_a_preempted_request_stays_with_its_rank(groups: Path) -> None:
    """Two on each rank, whose pools hold one and a half to the end."""
    asked = [request(index, prompt=index, num_tokens=40, max_tokens=50) for index in range(4)]
    with data_parallel(groups, 2, num_blocks=17) as loop:
        for each in asked:
            loop.submit(each)
        owners = [loop.rank_of(each.request_id) for each in asked]
        answers = run_at_once(loop, [])
        assert sorted(owners) == [0, 0, 1, 1]
        assert all(each.stats().preemptions for each in loop.loops)
        assert [each.stats().generated_tokens for each in loop.loops] == [100, 100]
    assert answers == {}


def test_an_aborted_request_leaves_the_other_ranks_alone(groups: Path) -> None:
    asked = [request(index, prompt=index, num_tokens=30, max_tokens=20) for index in range(2)]
    with data_parallel(groups, 2) as loop:
        for each in asked:
            loop.submit(each)
        for _ in range(4):
            loop.step()
        (ended,) = loop.abort(RequestId(0))
        assert ended.request_id == 0
        assert loop.abort(RequestId(0)) == []
        events = list[Any]()
        while loop.busy:
            events += loop.step()
    (finished,) = [event for event in events if getattr(event, "reason", None) is not None]
    assert (finished.request_id, finished.reason) == (1, FinishReason.LENGTH)


class Broken(Exception):
    """Of one rank."""


@pytest.mark.parametrize("broken", ["forward", "join_step"])
def test_a_rank_that_fails_ends_all_with_its_reason(groups: Path, broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise Broken("out of luck")

    asked = [request(1, prompt=1, num_tokens=20)]
    with data_parallel(groups, 2) as loop:
        monkeypatch.setattr(DeepseekModel, broken, fail)
        with pytest.raises(Broken, match="out of luck"):
            run_at_once(loop, asked)


def test_info_and_stats_are_of_all_ranks(groups: Path) -> None:
    with data_parallel(groups, 2) as loop:
        assert (loop.info.num_blocks, loop.info.max_num_seqs) == (400, 16)
        assert loop.info.composition["data_parallel"] == "2 ranks with whole attention, experts dealt out"
        assert loop.info.capabilities == (EngineCapability.FLUSH_CACHE,)
        with pytest.raises(Refused, match="pause"):
            loop.control(Pause())
        run_at_once(loop, [request(index, prompt=index, num_tokens=20, max_tokens=3) for index in range(4)])
        stats = loop.stats()
    assert (stats.prompt_tokens, stats.generated_tokens, stats.blocks_total) == (80, 12, 400)
    assert len(stats.plugin_faults) == 1


def test_a_plan_has_twice_the_tokens_of_tensor_parallel(groups: Path) -> None:
    """Tensor-parallel ranks of latents all hold the same; data-parallel ones each other sequences."""
    budget: dict[str, Any] = {"kv_cache_bytes": 1 << 22, "block_size_tokens": 8}

    def limits(**ranks: int) -> dict[str, int]:
        return resolve(DeepseekV2Definition(), groups, EngineOptions(**budget, **ranks)).plan().limits

    shared, apart = limits(tensor_parallel_size=2), limits(data_parallel_size=2)
    assert apart["kv_cache_tokens"] == 2 * shared["kv_cache_tokens"]
    assert (apart["data_parallel_size"], apart["kv_tokens_per_rank"]) == (2, shared["kv_cache_tokens"])


def test_the_ledger_has_whole_attention_and_a_share_of_the_experts(groups: Path) -> None:
    def weights_bytes(ranks: int) -> int:
        return resolve(DeepseekV2Definition(), groups, EngineOptions(data_parallel_size=ranks)).weights_bytes

    one, two, four = map(weights_bytes, (1, 2, 4))
    experts_bytes = 2 * (one - two)
    assert 0 < experts_bytes < one
    assert one - four == experts_bytes * 3 // 4


@pytest.mark.parametrize("host", LoopHost)
def test_launched_it_goes_on_as_recorded(groups: Path, host: LoopHost) -> None:
    check_launched(DeepseekV2(), groups, EngineOptions(**SIZES, data_parallel_size=2, engine_host=host), tolerance=1e-4)


@pytest.mark.parametrize("name", ["moonlight", "fp8_groups"])
def test_v3_s_router_and_quantised_experts_give_the_tokens_of_one_rank(name: str) -> None:
    model_dir = Path(__file__).parent / "fixtures_v3" / name

    def ask(ranks: int) -> Answer:
        options = EngineOptions(**SIZES, data_parallel_size=ranks, engine_host=LoopHost.THREAD)
        return ask_launched(DeepseekV3(), model_dir, options, range(1, 40), max_tokens=12, logprobs=0)

    apart, alone = ask(2), ask(1)
    assert apart.token_ids == alone.token_ids
    differences = [abs(a.logprob - b.logprob) for a, b in zip(apart.logprobs, alone.logprobs, strict=True)]
    assert max(differences) < 1e-4


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"tensor_parallel_size": 2}, "--data-parallel-size and --tensor-parallel-size exclude each other"),
        ({"kv_events": "5557"}, "--data-parallel-size and --kv-events exclude each other"),
        ({"speculative": "ngram"}, "--data-parallel-size and --speculative exclude each other"),
        ({"step_trace": "steps"}, "--data-parallel-size and --step-trace exclude each other"),
        ({"enable_sleep": True}, "--data-parallel-size and --enable-sleep exclude each other"),
        ({"data_parallel_size": 3}, "3 ranks cannot share experts equally: n_routed_experts is"),
    ],
)
def test_what_it_cannot_is_refused_by_name(groups: Path, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(Refused, match=reason):
        resolve(DeepseekV2Definition(), groups, EngineOptions(**{"data_parallel_size": 2, **options}))
