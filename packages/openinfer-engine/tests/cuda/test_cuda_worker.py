"""`CudaWorker` in the step loop, with models whose right answer is known: captured steps and others, also masked."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from openinfer_core import EngineInfo, GenerateRequest, RequestId, SamplingParams, TokenEvent, TokenLogprobs, Tokens
from openinfer_core.grammars import MaskWords, TokenMatcher
from openinfer_core.queue_policies import FirstComeFirstServed
from openinfer_core.sampling import Grammar, GrammarKind
from openinfer_core.scheduling import QueuePolicyConfig, SchedulerConfig, StepPlan
from openinfer_engine.cpu.worker import WorkerLimits
from openinfer_engine.distributed.communicator import SoloCommunicator
from openinfer_engine.loop import StepLoop
from openinfer_engine.model import KvLayers
from openinfer_engine.scheduler import TokenBudgetScheduler
from openinfer_engine.testing.windowed_steps import SeenModel, WindowedSteps, windowed_layout
from openinfer_engine.worker.paged_tensors import KvPool, make_pool
from openinfer_engine.worker.runner import PendingStep, ThreadRunner
from openinfer_kernels import Array, AttentionBatch, KernelsError, PagedCache
from openinfer_kv_cache import KvDtype

pytestmark = pytest.mark.gpu
VOCAB = 96
BLOCK = 4
MAX_MODEL_TOKENS = 48
NUM_BLOCKS = 64


def next_token(context: Sequence[int]) -> int:
    """What `SumModel` says after a context."""
    return (sum((i + 1) * token for i, token in enumerate(context)) * 31 + len(context)) % VOCAB


class SumModel:
    """Stores ids as KV; its logits are one-hot at a hash of the context, read back through the block tables."""

    def __init__(self, cupy: Any) -> None:
        self.cupy = cupy

    def forward(self, token_ids: Array, *, batch: AttentionBatch, kv_cache: KvLayers) -> Array:
        (cache,) = kv_cache["ids"]
        cupy, flat = self.cupy, cache.data.reshape(-1)
        (slots,), (tables,) = batch.cache_slots, batch.block_tables
        flat[cupy.where(slots < 0, flat.size - 1, slots)] = token_ids.astype(flat.dtype)
        row = cupy.searchsorted(batch.query_starts, cupy.arange(len(token_ids), dtype=np.int32), side="right") - 1
        ids = flat[: NUM_BLOCKS * BLOCK].reshape(-1, BLOCK)[tables[row]].reshape(len(token_ids), -1)
        places = cupy.arange(ids.shape[1])
        seen = cupy.where(places <= batch.positions[:, None], ids.astype(np.int64), 0)
        sums = (seen * (places + 1)).sum(axis=1) * 31 + batch.positions + 1
        hidden = cupy.zeros((len(token_ids), 8), flat.dtype)
        hidden[:, 0] = (sums % VOCAB).astype(flat.dtype)
        return hidden

    def logits(self, hidden: Array) -> Array:
        is_next = hidden[:, :1].astype(np.int32) == self.cupy.arange(VOCAB, dtype=np.int32)
        return (is_next * 5).astype(np.float32)


class FlatModel(SumModel):
    """Every token is as likely as the next: greedy rows take the lowest id that nothing speaks against."""

    def logits(self, hidden: Array) -> Array:
        return self.cupy.ones((len(hidden), VOCAB), np.float32)


class OddMatcher:
    """Allows a larger odd token after each token."""

    def __init__(self) -> None:
        self.accepted = [-1]

    def fill(self, words: MaskWords) -> None:
        words[:] = 0
        for token_id in range(self.accepted[-1] + 1, VOCAB):
            if token_id % 2:
                words[token_id // 32] |= np.uint32(1 << token_id % 32)

    def accept(self, token_id: int) -> None:
        self.accepted.append(token_id)

    def rollback(self, num_tokens: int) -> None:
        del self.accepted[len(self.accepted) - num_tokens :]


class OddCompiler:
    def compile(self, request: GenerateRequest) -> Future[TokenMatcher]:
        future: Future[TokenMatcher] = Future()
        future.set_result(OddMatcher())
        return future

    def close(self) -> None:
        pass


def make_loop(make_model: Callable[[Any], SumModel], *, capture: bool, num_blocks: int = NUM_BLOCKS) -> StepLoop:
    try:
        from openinfer_engine.cuda.worker import CudaWorker
        from openinfer_kernels.cuda.common.libraries import cupy
        from openinfer_kernels.cuda.ops import CudaOps

        ops = CudaOps()
    except KernelsError as reason:
        pytest.skip(str(reason))
    limits: dict[str, Any] = {
        "max_num_seqs": 8,
        "max_model_tokens": MAX_MODEL_TOKENS,
        "block_size_tokens": BLOCK,
    }
    ids = ops.zeros((NUM_BLOCKS + 1, 1, 1, 1, BLOCK, 1))
    rank = CudaWorker(
        make_model(cupy),
        kv_pool=KvPool(blocks=ids, layers={"ids": [PagedCache(data=ids, layer=0)]}),
        ops=ops,
        communicator=SoloCommunicator(),
        limits=WorkerLimits(num_token_ids=VOCAB, vocab_size=VOCAB, **limits),
    )
    rank.warm_up(capture=capture, mark=lambda _: None)
    config = SchedulerConfig(num_blocks=num_blocks, max_step_tokens=32, **limits)
    info = EngineInfo(
        model="sum",
        family="sum",
        max_model_tokens=MAX_MODEL_TOKENS,
        num_token_ids=VOCAB,
        eos_token_ids=(),
        block_size_tokens=BLOCK,
        num_blocks=num_blocks,
        max_num_seqs=8,
        max_waiting=1000,
    )
    scheduler = TokenBudgetScheduler(config, FirstComeFirstServed(QueuePolicyConfig()))
    return StepLoop(info=info, scheduler=scheduler, runner=ThreadRunner([rank]), grammar_compiler=OddCompiler())


def make_request(request_id: int, prompt: Sequence[int], **sampling: Any) -> GenerateRequest:
    params = SamplingParams(**{"max_tokens": 8, "temperature": 0.0, **sampling})
    return GenerateRequest(request_id=RequestId(request_id), prompt_token_ids=tuple(prompt), sampling=params)


def run(loop: StepLoop, requests: Sequence[GenerateRequest]) -> dict[int, list[Tokens]]:
    said: dict[int, list[Tokens]] = {request.request_id: [] for request in requests}

    def take(events: list[TokenEvent]) -> None:
        for event in events:
            if isinstance(event, Tokens):
                said[event.request_id].append(event)

    for request in requests:
        take(loop.submit(request))
    while loop.busy:
        take(loop.step())
    loop.close()
    return said


def tokens_of(events: Sequence[Tokens]) -> list[int]:
    return [token for event in events for token in event.token_ids]


def logprobs_of(events: Sequence[Tokens]) -> list[TokenLogprobs]:
    return [one for event in events for one in event.logprobs or ()]


def expected(prompt: Sequence[int], count: int) -> list[int]:
    context = list(prompt)
    for _ in range(count):
        context.append(next_token(context))
    return context[len(prompt) :]


@pytest.mark.parametrize("capture", [True, False])
@pytest.mark.parametrize("num_blocks", [NUM_BLOCKS, 13])
def test_random_traffic_gives_the_models_tokens(capture: bool, num_blocks: int) -> None:
    rng = np.random.default_rng(num_blocks)
    shared = rng.integers(0, VOCAB, 20).tolist()
    requests = [
        make_request(
            i,
            shared[: rng.integers(0, 20)] + rng.integers(0, VOCAB, rng.integers(1, 12)).tolist(),
            max_tokens=int(rng.integers(1, 16)),
            logprobs=1 if i % 5 == 0 else None,
            prompt_logprobs=0 if i % 7 == 0 else None,
        )
        for i in range(40)
    ]
    loop = make_loop(SumModel, capture=capture, num_blocks=num_blocks)
    said = run(loop, requests)
    for request in requests:
        events = said[request.request_id]
        assert tokens_of(events) == expected(request.prompt_token_ids, request.sampling.max_tokens)
        if request.sampling.logprobs is not None:
            assert [one.top_ids[0] for one in logprobs_of(events)] == tokens_of(events)
        if request.sampling.prompt_logprobs is not None:
            scored = [one for event in events for one in event.prompt_logprobs or ()]
            assert len(scored) == len(request.prompt_token_ids) - 1
            for position, one in enumerate(scored, start=1):
                is_likeliest = next_token(request.prompt_token_ids[:position]) == request.prompt_token_ids[position]
                assert (one.rank == 1) == is_likeliest
    assert (loop.stats().preemptions > 0) == (num_blocks < NUM_BLOCKS)


@pytest.mark.parametrize("capture", [True, False])
def test_steps_of_no_rows_change_nothing(capture: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, pending = make_loop(SumModel, capture=capture), list[PendingStep]()
    launch, none = loop.runner.launch, np.zeros(0, np.int32)
    names = ("slots", "starts", "counts", "num_host_tokens", "max_new", "token_ids", "new_block_counts", "new_blocks")

    def launch_after_an_empty_one(plan: StepPlan) -> PendingStep:
        pending.append(launch(StepPlan(step=plan.step, **dict.fromkeys(names, none))))
        if len(pending) % 2:
            assert not len(pending[-1].result().new_counts)
        return launch(plan)

    monkeypatch.setattr(loop.runner, "launch", launch_after_an_empty_one)
    requests = [make_request(i, [i] * (1 + 3 * i), max_tokens=12) for i in range(6)]
    said = run(loop, requests)
    for request in requests:
        assert tokens_of(said[request.request_id]) == expected(request.prompt_token_ids, 12)
    assert len(pending) >= 12


@pytest.mark.parametrize("capture", [True, False])
def test_every_change_of_logits_acts_on_its_own_row_from_step_to_step(capture: bool) -> None:
    grammar = Grammar(kind=GrammarKind.REGEX, text="odd")
    requests = [
        make_request(0, [7, 7, 7]),
        make_request(1, [2, 3], presence_penalty=1.0),
        make_request(2, [0, 1, 5], repetition_penalty=2.0),
        make_request(3, [1], logit_bias={40: 2.0, 41: 1.0}, frequency_penalty=0.5),
        make_request(4, [1], stop_token_ids=(0, 2), min_tokens=3),
        make_request(5, [1], grammar=grammar, max_tokens=5),
        make_request(6, [1], grammar=grammar, logit_bias={20: 5.0, 31: 5.0}, max_tokens=3, logprobs=2),
        make_request(7, [1], logit_bias=dict.fromkeys(range(64), -np.inf)),
        *(make_request(8 + i, [i] * (1 + 3 * i)) for i in range(8)),
    ]
    said = {i: tokens_of(events) for i, events in run(make_loop(FlatModel, capture=capture), requests).items()}
    assert said[0] == [0] * 8
    assert said[1] == list(range(8))
    assert said[2] == [2, 3, 4, 6, 7, 8, 9, 10]
    assert said[3] == [40, 40, 40, 41, 40, 41, 0, 1]
    assert said[4] == [1, 1, 1]
    assert said[5] == [1, 3, 5, 7, 9]
    assert said[6] == [31, 33, 35]
    assert said[7] == [64] * 8
    assert all(said[8 + i] == [0] * 8 for i in range(8))


@pytest.mark.gpu
@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize("windows", [(None, 20), (17,), (None, 40, 18, None)])
def test_every_layer_sees_its_own_tokens_in_blocks_that_are_used_again(windows: Any, capture: bool) -> None:
    try:
        from openinfer_engine.cuda.worker import CudaWorker
        from openinfer_kernels.cuda.common.libraries import cupy
        from openinfer_kernels.cuda.ops import CudaOps

        ops = CudaOps()
    except KernelsError as reason:
        pytest.skip(str(reason))
    layout = windowed_layout(windows, dtype=KvDtype.BFLOAT16, block_tokens=BLOCK)
    pool = make_pool(layout, num_blocks=320, ops=ops)
    pool.blocks.fill(np.nan)
    limits = WorkerLimits(
        max_num_seqs=5,
        max_model_tokens=100,
        block_size_tokens=BLOCK,
        num_tables=layout.num_tables,
        num_token_ids=VOCAB,
        vocab_size=VOCAB,
    )
    model = SeenModel(cupy, windows, vocab_size=VOCAB)
    worker = CudaWorker(model, kv_pool=pool, ops=ops, communicator=SoloCommunicator(), limits=limits)
    worker.warm_up(capture=capture, mark=lambda _: None)
    prompts = [np.random.default_rng(size).integers(1, VOCAB, size).tolist() for size in (1, 40, 70, 3, 64, 17, 33)]
    steps = WindowedSteps(
        worker,
        pool,
        table_windows=layout.table_windows,
        block_tokens=BLOCK,
        synchronize=cupy.cuda.Device().synchronize,
    )
    answers = steps.run(prompts, max_tokens=20, max_num_seqs=5)
    worker.close()
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = list(prompt)
        for _ in range(20):
            tokens.append(model.right_token(tokens))
        assert answer.token_ids == tokens[len(prompt) :]
