"""The step loop, the runner and the default scheduler together, with a model whose right answer is known.

`SumModel` keeps a token id per position in the KV cache and predicts a hash of everything in the context, read back
through the block tables. A wrong block, a stale id on the device or a lost position changes every later token.
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest

from openinfer_core import (
    EngineCapability,
    EngineInfo,
    Failed,
    FailureKind,
    Finished,
    FinishReason,
    GenerateRequest,
    Ledger,
    LoadedAdapter,
    Refused,
    RequestId,
    SamplingParams,
    Scheduled,
    TokenEvent,
    Tokens,
)
from openinfer_core.control import FlushCache, LoadAdapter
from openinfer_core.errors import ContractViolation
from openinfer_core.queue_policies import FirstComeFirstServed
from openinfer_core.sampling import Grammar, GrammarKind
from openinfer_core.scheduling import QueuePolicyConfig, SchedulerConfig
from openinfer_engine.adapters import AdapterTable
from openinfer_engine.cpu.worker import CpuWorker, WorkerLimits
from openinfer_engine.distributed.communicator import SoloCommunicator
from openinfer_engine.loop import StepLoop
from openinfer_engine.model import KvLayers
from openinfer_engine.scheduler import TokenBudgetScheduler
from openinfer_engine.worker.paged_tensors import KvPool
from openinfer_engine.worker.runner import ThreadRunner
from openinfer_kernels import Array, AttentionBatch, PagedCache
from openinfer_kernels.cpu import CpuOps

VOCAB = 97
BLOCK = 4


def next_token(context: Sequence[int]) -> int:
    """What the model says after a context."""
    return (sum((i + 1) * token for i, token in enumerate(context)) * 31 + len(context)) % VOCAB


class SumModel:
    """Stores ids as KV; its logits are one-hot at `next_token`."""

    def forward(self, token_ids: Array, *, batch: AttentionBatch, kv_cache: KvLayers) -> Array:
        (cache,) = kv_cache["ids"]
        cache.data.reshape(-1)[batch.cache_slots[cache.table]] = token_ids
        hidden = np.zeros((len(token_ids), 1), np.float32)
        for row in range(len(batch.context_lens)):
            blocks = batch.block_tables[cache.table][row, : -(-int(batch.context_lens[row]) // BLOCK)]
            ids = cache.data.reshape(-1, BLOCK)[blocks].reshape(-1).astype(int).tolist()
            for token in range(int(batch.query_starts[row]), int(batch.query_starts[row + 1])):
                hidden[token, 0] = next_token(ids[: int(batch.positions[token]) + 1])
        return hidden

    def logits(self, hidden: Array) -> Array:
        logits = np.zeros((len(hidden), VOCAB), np.float32)
        logits[np.arange(len(hidden)), hidden[:, 0].astype(int)] = 5.0
        return logits


class NanModel(SumModel):
    """Gives no finite logits after a context that holds the token 13."""

    def logits(self, hidden: Array) -> Array:
        logits = super().logits(hidden)
        logits[hidden[:, 0] == 13] = np.nan
        return logits


def make_loop(
    *,
    num_blocks: int = 64,
    max_num_seqs: int = 8,
    max_step_tokens: int = 16,
    model: SumModel | None = None,
    scheduler: type[TokenBudgetScheduler] = TokenBudgetScheduler,
    adapters: AdapterTable | None = None,
) -> StepLoop:
    max_model_tokens = 48
    config = SchedulerConfig(
        num_blocks=num_blocks,
        block_size_tokens=BLOCK,
        max_num_seqs=max_num_seqs,
        max_step_tokens=max_step_tokens,
        max_model_tokens=max_model_tokens,
        max_waiting=1000,
    )
    ops = CpuOps()
    ids = ops.zeros((num_blocks, 1, 1, 1, BLOCK, 1))
    rank = CpuWorker(
        model or SumModel(),
        kv_pool=KvPool(blocks=ids, layers={"ids": [PagedCache(data=ids, layer=0)]}),
        ops=ops,
        communicator=SoloCommunicator(),
        limits=WorkerLimits(
            max_num_seqs=max_num_seqs,
            max_model_tokens=max_model_tokens,
            block_size_tokens=BLOCK,
            num_token_ids=VOCAB,
            vocab_size=VOCAB,
        ),
    )
    info = EngineInfo(
        model="sum",
        family="sum",
        max_model_tokens=max_model_tokens,
        num_token_ids=VOCAB,
        eos_token_ids=(),
        block_size_tokens=BLOCK,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_waiting=1000,
    )
    policy = FirstComeFirstServed(QueuePolicyConfig())
    return StepLoop(info=info, scheduler=scheduler(config, policy), runner=ThreadRunner([rank]), adapters=adapters)


def make_request(request_id: int, prompt: Sequence[int], **sampling: object) -> GenerateRequest:
    params = SamplingParams(**{"max_tokens": 8, "temperature": 0.0, **sampling})
    return GenerateRequest(request_id=RequestId(request_id), prompt_token_ids=tuple(prompt), sampling=params)


def run(loop: StepLoop, requests: Sequence[GenerateRequest]) -> dict[int, list[TokenEvent]]:
    """Events per request, through a ledger."""
    ledger = Ledger()
    events: dict[int, list[TokenEvent]] = {request.request_id: [] for request in requests}

    def deliver(new: list[TokenEvent]) -> None:
        for event in ledger.record(new):
            events[event.request_id].append(event)

    for request in requests:
        ledger.open(request)
        deliver(loop.submit(request))
    for _ in range(10_000):
        if not loop.busy:
            break
        deliver(loop.step())
    assert not loop.busy
    assert len(ledger) == 0
    return events


def tokens_of(events: Sequence[TokenEvent]) -> list[int]:
    return [token for event in events if isinstance(event, Tokens) for token in event.token_ids]


def expected(prompt: Sequence[int], count: int) -> list[int]:
    context = list(prompt)
    for _ in range(count):
        context.append(next_token(context))
    return context[len(prompt) :]


@pytest.mark.parametrize("num_blocks", [64, 12])
def test_random_traffic_gives_the_models_tokens_also_under_preemption(num_blocks: int) -> None:
    rng = np.random.default_rng(num_blocks)
    shared = rng.integers(0, VOCAB, 20).tolist()
    requests = [
        make_request(
            i,
            shared[: rng.integers(0, 20)] + rng.integers(0, VOCAB, rng.integers(1, 12)).tolist(),
            max_tokens=int(rng.integers(1, 16)),
        )
        for i in range(40)
    ]
    loop = make_loop(num_blocks=num_blocks)
    events = run(loop, requests)
    for request in requests:
        said = events[request.request_id]
        assert tokens_of(said) == expected(request.prompt_token_ids, request.sampling.max_tokens)
        assert isinstance(said[-1], Finished)
        assert said[-1].reason is FinishReason.LENGTH
        assert said[-1].completion_tokens == request.sampling.max_tokens
    stats = loop.stats()
    assert (stats.preemptions > 0) == (num_blocks == 12)
    assert stats.blocks_used == 0
    assert stats.cached_tokens > 0
    loop.close()


def test_stop_token_ends_one_step_late_and_is_not_delivered() -> None:
    prompt = [5, 6, 7]
    stop = expected(prompt, 3)[2]
    loop = make_loop()
    said = run(loop, [make_request(0, prompt, stop_token_ids=(stop,))])[0]
    assert tokens_of(said) == expected(prompt, 2)
    assert said[-1] == Finished(RequestId(0), FinishReason.STOP, 3, 3, 0, stop)
    assert loop.stats().wasted_rows == 1
    loop.close()


def test_min_tokens_forbids_the_stop_token_until_then() -> None:
    prompt = [5, 6, 7]
    first = expected(prompt, 1)[0]
    loop = make_loop()
    said = run(loop, [make_request(0, prompt, stop_token_ids=(first,), min_tokens=2, max_tokens=2)])[0]
    assert first not in tokens_of(said)
    assert said[-1].completion_tokens == 2
    loop.close()


def test_logprobs_of_prompt_and_completion_cover_every_position_over_chunks() -> None:
    prompt = list(range(1, 40))
    loop = make_loop()
    said = run(loop, [make_request(0, prompt, logprobs=2, prompt_logprobs=1, max_tokens=3)])[0]
    tokens = [event for event in said if isinstance(event, Tokens)]
    scored = [one for event in tokens for one in event.prompt_logprobs or ()]
    assert len(scored) == len(prompt) - 1
    for position, one in enumerate(scored, start=1):
        likeliest = next_token(prompt[:position])
        assert one.top_ids == (likeliest,)
        assert (one.rank == 1) == (prompt[position] == likeliest)
    generated = [one for event in tokens for one in event.logprobs or ()]
    assert [one.rank for one in generated] == [1, 1, 1]
    assert [one.top_ids[0] for one in generated] == tokens_of(said)
    assert all(len(one.top_ids) == 2 for one in generated)
    loop.close()


def test_scoring_a_prompt_without_generating() -> None:
    loop = make_loop()
    said = run(loop, [make_request(0, [1, 2, 3], max_tokens=0, prompt_logprobs=0)])[0]
    assert tokens_of(said) == []
    assert sum(len(event.prompt_logprobs or ()) for event in said if isinstance(event, Tokens)) == 2
    assert isinstance(said[-1], Finished)
    loop.close()


def test_a_row_without_finite_logits_fails_its_request_alone() -> None:
    bad = next(prompt for prompt in ([i, i + 1] for i in range(90)) if next_token(prompt) == 13)
    good = [prompt for prompt in ([i, i + 3] for i in range(90)) if 13 not in expected(prompt, 8)][:5]
    loop = make_loop(model=NanModel())
    events = run(loop, [make_request(0, bad), *(make_request(i + 1, prompt) for i, prompt in enumerate(good))])
    assert events[0][-1] == Failed(RequestId(0), FailureKind.INTERNAL, "the model gave no finite logit to sample from")
    for i, prompt in enumerate(good):
        assert tokens_of(events[i + 1]) == expected(prompt, 8)
    loop.close()


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (make_request(0, [1, VOCAB]), "beyond the model's"),
        (make_request(0, [1], logit_bias={VOCAB: 1.0}), "logit_bias"),
        (make_request(0, [1], grammar=Grammar(kind=GrammarKind.REGEX, text="a*")), "grammar"),
        (make_request(0, list(range(60))), "context"),
    ],
)
def test_what_the_engine_cannot_serve_is_refused_at_once(request_: GenerateRequest, message: str) -> None:
    loop = make_loop()
    (event,) = run(loop, [request_])[0]
    assert isinstance(event, Failed)
    assert event.kind is FailureKind.INVALID
    assert message in event.message
    loop.close()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"adapter": LoadedAdapter(b"0" * 16, 0)}, "a request names lora alone"),
        ({"transfer": {"do_remote_prefill": True}}, "send no transfer"),
    ],
)
def test_what_the_engine_was_not_made_for_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    request = msgspec.structs.replace(make_request(0, [1, 2]), **fields)
    (failed,) = make_loop().submit(request)
    assert isinstance(failed, Failed)
    assert failed.kind is FailureKind.INVALID
    assert message in failed.message


def test_request_that_names_no_adapter_of_the_engine_finds_no_model() -> None:
    (failed,) = make_loop().submit(msgspec.structs.replace(make_request(0, [1, 2]), lora="calls"))
    assert isinstance(failed, Failed)
    assert failed.kind is FailureKind.NOT_FOUND
    assert "the model 'calls' is not served here" in failed.message


class Adapters:
    """One name, whose content changes."""

    content = b"first adapter..."
    is_loading = False

    def find(self, name: str, *, tenant: str) -> LoadedAdapter | None:
        del tenant
        return LoadedAdapter(self.content, 3) if name == "calls" else None

    def count_waiting_by(self, num_waiting: Any) -> None:
        """All of it stays."""

    def settle(self) -> list[Any]:
        return []

    def applied(self, plan: Any) -> None:
        """Nothing is pinned."""


class NotesRequests(TokenBudgetScheduler):
    added: ClassVar[list[GenerateRequest]] = []

    def add(self, request: GenerateRequest, *, now_s: float) -> list[TokenEvent]:
        self.added.append(request)
        return super().add(request, now_s=now_s)


def test_scheduler_sees_an_adapter_by_its_content_and_shares_no_kv_of_what_had_its_name_before() -> None:
    adapters = Adapters()
    NotesRequests.added.clear()
    loop = make_loop(adapters=adapters, scheduler=NotesRequests)
    prompt = list(range(12))
    cached: list[int] = []
    for number, content in enumerate((adapters.content, adapters.content, b"second adapter..")):
        adapters.content = content
        request = msgspec.structs.replace(make_request(number, prompt), lora="calls")
        events = run(loop, [request])[number]
        cached += [event.cached_tokens for event in events if isinstance(event, Scheduled)]
    assert [request.adapter for request in NotesRequests.added] == [
        LoadedAdapter(b"first adapter...", 3),
        LoadedAdapter(b"first adapter...", 3),
        LoadedAdapter(b"second adapter..", 3),
    ]
    assert cached == [0, 8, 0]


def test_flushed_cache_is_not_found_again_and_rows_in_flight_are_not_lost() -> None:
    loop = make_loop()
    prompt = list(range(12))
    assert EngineCapability.FLUSH_CACHE in loop.info.capabilities
    run(loop, [make_request(0, prompt)])
    running = make_request(1, [*prompt, 5])
    events = loop.submit(running) + loop.step() + loop.step()
    events += loop.control(FlushCache())
    while loop.busy:
        events += loop.step()
    assert tokens_of(events) == expected(running.prompt_token_ids, 8)
    (cached,) = [
        event.cached_tokens for event in run(loop, [make_request(2, prompt)])[2] if isinstance(event, Scheduled)
    ]
    assert cached == 0
    (cached,) = [
        event.cached_tokens for event in run(loop, [make_request(3, prompt)])[3] if isinstance(event, Scheduled)
    ]
    assert cached == 8


def test_command_that_the_engine_was_not_made_for_is_refused_by_name() -> None:
    with pytest.raises(Refused, match="cannot do load_adapter; its capabilities are: flush_cache"):
        make_loop().control(LoadAdapter("calls", "/adapters/calls"))


def test_a_wedged_scheduler_is_reported_and_not_spun_on() -> None:
    class Wedged(TokenBudgetScheduler):
        def plan(self, *, now_s: float) -> None:
            return None

    loop = make_loop(scheduler=Wedged)
    loop.submit(make_request(0, [1]))
    with pytest.raises(ContractViolation, match="wedged"):
        loop.step()
    loop.close()


NO_LATE_IMPORTS = """
import sys
from test_loop import EngineCapability, make_loop, make_request
loop = make_loop()
asked = {"min_tokens": 1, "stop_token_ids": (5, 4), "logit_bias": {7: 1.0}, "logprobs": 1}
loop.submit(make_request(0, [1, 2, 3], max_tokens=2, **asked))
while loop.busy:
    loop.step()
before = set(sys.modules)
for number in range(1, 40):
    loop.submit(make_request(number, [1, 2, 3], max_tokens=16))
    while loop.busy:
        loop.step()
late = sorted(name for name in {*sys.modules} - before | {"numpy.ma"} & {*sys.modules})
sys.exit(f"imported by a step: {late}" if late else 0)
"""


def test_steps_import_nothing() -> None:
    """NumPy has parts that it imports when they are first asked for: a step that does so stalls all requests."""
    command = [sys.executable, "-c", NO_LATE_IMPORTS]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
