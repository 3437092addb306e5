"""Data-parallel ranks on GPUs: the answers of one GPU, in graphs that all ranks replay and without graphs.

Random weights, the attention of the published sizes. Each test runs with a GPU for each rank, where there are two, and
with ranks that share one (`engine/testing/ranks_of_one_gpu.py`).
"""

import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from killed_rank import check_a_killed_rank
from numpy.typing import NDArray
from safetensors.numpy import save_file

from openinfer_core import GenerateRequest, RequestId, SamplingParams
from openinfer_deepseek.family import DeepseekV2
from openinfer_deepseek.model import DeepseekModel
from openinfer_engine import EngineOptions, StepLoop, build_loop, resolve
from openinfer_engine.data_parallel.loop import DataParallelLoop
from openinfer_engine.engine_spec import EngineSpec
from openinfer_engine.launch import build_engine_loop
from openinfer_engine.options import DeviceKind
from openinfer_engine.testing import Answer, prompt_differences, random_requests, random_weights, run_at_once
from openinfer_engine.worker.process_group import start_workers

pytestmark = pytest.mark.gpu
CONFIG = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "first_k_dense_replace": 1,
    "hidden_size": 256,
    "intermediate_size": 512,
    "kv_lora_rank": 512,
    "max_position_embeddings": 2048,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 128,
    "n_routed_experts": 16,
    "n_shared_experts": 2,
    "num_attention_heads": 4,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 3,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "v_head_dim": 128,
    "vocab_size": 1024,
}
BF16_LOGPROB = 0.5
"""How far a log-probability may be from another number of ranks': BF16 turns near ties of the router, so experts."""


@pytest.fixture(params=["a GPU each", "one GPU"], autouse=True)
def num_gpus(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    pytest.importorskip("cupy", reason="data-parallel ranks on GPUs need CuPy")
    from openinfer_kernels import DeviceUnavailableError
    from openinfer_kernels.cuda.common.device import gpu_count

    try:
        count = gpu_count()
    except DeviceUnavailableError as reason:
        pytest.skip(str(reason))
    if request.param == "one GPU":
        from openinfer_engine.testing.ranks_of_one_gpu import share_one_gpu

        share_one_gpu(monkeypatch)
        return 1
    if count < 2:
        pytest.skip(f"two GPUs are needed, and there is {count}")
    return 2


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(random_weights(DeepseekV2().definition, CONFIG), folder / "model.safetensors")
    return folder


def options(**given: Any) -> EngineOptions:
    return EngineOptions(**{"num_blocks": 256, "max_num_seqs": 16, "device": DeviceKind.CUDA, **given})


def apart(model_dir: Path, **given: Any) -> DataParallelLoop:
    loop = build_engine_loop(resolve(DeepseekV2().definition, model_dir, options(data_parallel_size=2, **given)))
    assert isinstance(loop, DataParallelLoop)
    return loop


def together(model_dir: Path, ranks: int) -> StepLoop:
    return build_loop(resolve(DeepseekV2().definition, model_dir, options(tensor_parallel_size=ranks)))


def run(loop: DataParallelLoop | StepLoop, asked: Sequence[GenerateRequest]) -> dict[int, Answer]:
    with closing(loop):
        return run_at_once(loop, asked)


def uneven(count: int = 14, **sampling: Any) -> list[GenerateRequest]:
    """1 to 40 tokens to generate, so that ranks run dry at different times."""
    asked = random_requests(count, vocab_size=1024, max_prompt_tokens=89)
    return [
        GenerateRequest(
            request_id=each.request_id,
            prompt_token_ids=each.prompt_token_ids,
            sampling=SamplingParams(**{"temperature": 0.0, "max_tokens": 1 + 13 * (index % 4), **sampling}),
        )
        for index, each in enumerate(asked)
    ]


def tokens_of(answers: dict[int, Answer]) -> dict[int, list[int]]:
    return {request_id: answer.token_ids for request_id, answer in answers.items()}


def num_different(first: dict[int, list[int]], second: dict[int, list[int]]) -> int:
    return sum(first[each] != second[each] for each in first)


def test_log_probabilities_are_those_of_one_gpu_and_of_tensor_parallel(model_dir: Path, num_gpus: int) -> None:
    asked = uneven(prompt_logprobs=0)
    found = run(apart(model_dir), asked)
    for ranks in (1, 2)[:num_gpus]:
        differences = prompt_differences(found, run(together(model_dir, ranks), asked))
        assert len(differences) > 300
        assert max(differences) < BF16_LOGPROB, ranks
        assert np.mean(differences) < BF16_LOGPROB / 10, ranks


def regrets(model_dir: Path, asked: Sequence[GenerateRequest], said: dict[int, list[int]]) -> NDArray[np.float64]:
    """How much likelier the likeliest token is than each one that was said, for one GPU that is given all of them."""
    given = [
        GenerateRequest(
            request_id=each.request_id,
            prompt_token_ids=(*each.prompt_token_ids, *said[each.request_id]),
            sampling=SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1),
        )
        for each in asked
    ]
    scored = run(together(model_dir, 1), given)
    found = [one for i, tokens in said.items() for one in scored[i].prompt_logprobs[-len(tokens) :]]
    return np.asarray([each.top_logprobs[0] - each.logprob for each in found])


def test_greedy_tokens_are_the_likeliest_of_one_gpu_in_graphs_and_without(model_dir: Path) -> None:
    """Not the same ones: other sizes of batches round elsewhere, which turns near ties of these random weights."""
    asked = uneven()
    captured, again = (tokens_of(run(apart(model_dir), asked)) for _ in range(2))
    one_by_one = tokens_of(run(apart(model_dir, cuda_graph=False), asked))
    assert captured == again
    for said in (captured, one_by_one):
        found = regrets(model_dir, asked, said)
        assert len(found) > 200
        assert found.max() < BF16_LOGPROB
        assert found.mean() < BF16_LOGPROB / 10
    others = {i: [(token + 1) % CONFIG["vocab_size"] for token in tokens] for i, tokens in captured.items()}
    assert regrets(model_dir, asked, others).mean() > 2 * BF16_LOGPROB


def test_draws_are_those_of_one_gpu_in_graphs_and_without(model_dir: Path) -> None:
    """Of the first tokens: after a near tie of the draw everything is another."""
    drawn: dict[str, Any] = {"temperature": 0.8, "top_k": 20, "top_p": 0.9}
    asked = uneven(**drawn, seed=7)
    captured, again = (tokens_of(run(apart(model_dir), asked)) for _ in range(2))
    assert captured == again
    one_by_one = tokens_of(run(apart(model_dir, cuda_graph=False), asked))
    alone = tokens_of(run(together(model_dir, 1), asked))
    others = tokens_of(run(together(model_dir, 1), uneven(**drawn, seed=8)))
    assert num_different(first_tokens(captured), first_tokens(one_by_one)) <= len(asked) // 3
    assert num_different(first_tokens(captured), first_tokens(alone)) <= len(asked) // 3
    assert num_different(first_tokens(captured), first_tokens(others)) > 2 * len(asked) // 3


def first_tokens(said: dict[int, list[int]], count: int = 4) -> dict[int, list[int]]:
    return {i: tokens[:count] for i, tokens in said.items()}


def test_a_rank_without_rows_and_long_prompts_join(model_dir: Path) -> None:
    """One request alone, whose prompt is in no graph: the other GPU computes experts alone, in both kinds of steps."""
    prompt = tuple(np.random.default_rng(6).integers(0, 1024, 900).tolist())
    sampling = SamplingParams(max_tokens=24, temperature=0.0, prompt_logprobs=0)
    asked = [GenerateRequest(request_id=RequestId(0), prompt_token_ids=prompt, sampling=sampling)]
    loop = apart(model_dir)
    with closing(loop):
        found = run_at_once(loop, asked)
        assert [each.stats().steps > 0 for each in loop.loops] == [True, False]
    expected = run(together(model_dir, 1), asked)
    assert np.mean(prompt_differences(found, expected)) < BF16_LOGPROB / 10
    assert len(found[0].token_ids) == 24


def test_a_tight_pool_preempts_and_every_request_gets_all_its_tokens(model_dir: Path) -> None:
    loop = apart(model_dir, num_blocks=16, max_step_tokens=64)
    with closing(loop):
        said = tokens_of(run_at_once(loop, uneven(8, max_tokens=100)))
        assert loop.stats().preemptions > 0
    assert {len(tokens) for tokens in said.values()} == {100}


def long_prompts(first_id: int, *, count: int, num_tokens: int, prompt: int = 0) -> list[GenerateRequest]:
    """Those of one number are the same, whatever their ids."""
    rng = np.random.default_rng(prompt)
    sampling = SamplingParams(max_tokens=8, temperature=0.0)
    return [
        GenerateRequest(
            request_id=RequestId(first_id + index),
            prompt_token_ids=tuple(rng.integers(0, 1024, num_tokens).tolist()),
            sampling=sampling,
        )
        for index in range(count)
    ]


def test_a_prefix_is_found_on_its_rank(model_dir: Path) -> None:
    loop = apart(model_dir)
    with closing(loop):
        first = run_at_once(loop, long_prompts(0, count=4, num_tokens=200))
        again = run_at_once(loop, long_prompts(10, count=4, num_tokens=200))
        # Two prompts a rank, and of each the second time what is no whole block.
        assert [each.stats().prompt_tokens for each in loop.loops] == [416, 416]
    assert [each.cached_tokens for each in again.values()] == [192] * 4
    different = num_different({10 + each: tokens for each, tokens in tokens_of(first).items()}, tokens_of(again))
    assert different <= 1


def test_tiers_of_each_rank(model_dir: Path) -> None:
    """Prompts that left the pool come back from the tier of the rank that had them, and say the same."""
    loop = apart(model_dir, kv_tier=["host=64MiB"], kv_load_timeout_ms=60_000)
    with closing(loop):
        first = run_at_once(loop, long_prompts(0, count=4, num_tokens=200))
        run_at_once(loop, long_prompts(20, count=12, num_tokens=900, prompt=1))  # more than the pools hold
        again = run_at_once(loop, long_prompts(10, count=4, num_tokens=200))
        assert [each.stats().tier_tokens for each in loop.loops] == [384, 384]
    assert [each.cached_tokens for each in again.values()] == [192] * 4
    assert num_different({10 + each: tokens for each, tokens in tokens_of(first).items()}, tokens_of(again)) <= 1


def test_what_an_earlier_engine_left_on_disks_is_found_on_each_rank(model_dir: Path, tmp_path: Path) -> None:
    tiers: dict[str, Any] = {"kv_tier": [f"disk={tmp_path}/kv-{{rank}},64MiB"], "kv_load_timeout_ms": 60_000}
    first = run(apart(model_dir, **tiers), long_prompts(0, count=4, num_tokens=200))
    loop = apart(model_dir, **tiers)
    with closing(loop):
        again = run_at_once(loop, long_prompts(10, count=4, num_tokens=200)[::-1])
        assert [each.stats().tier_tokens for each in loop.loops] == [384, 384]
    assert [each.cached_tokens for each in again.values()] == [192] * 4
    assert num_different({10 + each: tokens for each, tokens in tokens_of(first).items()}, tokens_of(again)) <= 1


class Broken(Exception):
    """Of one rank."""


def two_of_which_one_ends_early() -> list[GenerateRequest]:
    """One for each rank: the first rank has no rows while the other one goes on."""
    return [
        GenerateRequest(
            request_id=RequestId(index),
            prompt_token_ids=tuple(range(1 + index, 30 + index)),
            sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0),
        )
        for index, max_tokens in enumerate((2, 400))
    ]


def test_a_rank_that_fails_ends_all_with_its_reason(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise Broken("out of luck")

    loop = apart(model_dir, cuda_graph=False)
    with closing(loop):
        monkeypatch.setattr(DeepseekModel, "join_step", fail)
        with pytest.raises(Broken, match="out of luck"):
            run_at_once(loop, two_of_which_one_ends_early())


def test_a_rank_that_is_killed_in_a_step_ends_the_engine_with_its_reason(model_dir: Path) -> None:
    asked = options(data_parallel_size=2)
    processes = start_workers(EngineSpec.of(DeepseekV2().definition, model_dir, asked), asked)
    assert processes is not None
    loop = build_engine_loop(resolve(DeepseekV2().definition, model_dir, asked), processes)
    with closing(loop):
        check_a_killed_rank(loop, processes, two_of_which_one_ends_early())
