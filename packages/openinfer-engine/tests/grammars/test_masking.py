"""Requests with a grammar in the step loop: compiled, masked, failed alone."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, cast

import numpy as np
import pytest

from openinfer_core import (
    EngineInfo,
    Failed,
    FailureKind,
    Finished,
    FinishReason,
    GenerateRequest,
    InvalidRequest,
    Ledger,
    RequestId,
    SamplingParams,
    Scheduled,
    TokenEvent,
    Tokens,
)
from openinfer_core.grammars import MaskWords, TokenMatcher, mask_words
from openinfer_core.queue_policies import FirstComeFirstServed
from openinfer_core.sampling import Grammar, GrammarKind
from openinfer_core.scheduling import QueuePolicyConfig, Scheduler, SchedulerConfig, StepPlan, StepResult
from openinfer_engine.cpu.worker import CpuWorker, WorkerLimits
from openinfer_engine.distributed.communicator import SoloCommunicator
from openinfer_engine.loop import StepLoop
from openinfer_engine.model import KvLayers
from openinfer_engine.scheduler import TokenBudgetScheduler
from openinfer_engine.worker.paged_tensors import KvPool
from openinfer_engine.worker.runner import ThreadRunner
from openinfer_kernels import Array, AttentionBatch
from openinfer_kernels.cpu import CpuOps

VOCAB = 40
STOP = 39
BLOCK = 4


class FlatModel:
    """Every token is as likely as the next, so that a mask alone decides: greedy rows take the lowest allowed id."""

    def forward(self, token_ids: Array, *, batch: AttentionBatch, kv_cache: KvLayers) -> Array:
        del batch, kv_cache
        return np.zeros((len(token_ids), 1), np.float32)

    def logits(self, hidden: Array) -> Array:
        return np.zeros((len(hidden), VOCAB), np.float32)


class WordMatcher:
    """Allows the tokens of a word one after the other, then the stop token."""

    def __init__(self, word: Sequence[int]) -> None:
        self.word = list(word)
        self.accepted: list[int] = []

    def fill(self, words: MaskWords) -> None:
        done = len(self.accepted) == len(self.word)
        allowed = STOP if done else self.word[len(self.accepted)]
        words[:] = 0
        if allowed >= 0:
            words[allowed // 32] = 1 << (allowed % 32)

    def accept(self, token_id: int) -> None:
        if token_id == 13:
            raise RuntimeError("an unlucky number")
        self.accepted.append(token_id)

    def rollback(self, num_tokens: int) -> None:
        del self.accepted[len(self.accepted) - num_tokens :]


class FillFails(WordMatcher):
    def fill(self, words: MaskWords) -> None:
        if self.accepted:
            raise RuntimeError("no mask")
        super().fill(words)


class NoIdentity(WordMatcher):
    @property
    def mask_identity(self) -> bytes | None:
        raise RuntimeError("no identity")


class WordCompiler:
    """The grammar's text is the word, `7,8,9`; futures are done at once unless held."""

    def __init__(self, *, held: bool = False, make: Callable[[Sequence[int]], TokenMatcher] = WordMatcher) -> None:
        self.held = held
        self.make = make
        self.futures: list[Future[TokenMatcher]] = []
        self.closed = False

    def compile(self, request: GenerateRequest) -> Future[TokenMatcher]:
        future: Future[TokenMatcher] = Future()
        self.futures.append(future)
        assert request.sampling.grammar is not None
        match request.sampling.grammar.text:
            case "raises":
                raise RuntimeError("the compiler broke at once")
            case "exits":
                raise SystemExit(3)
            case "no future":
                return cast("Future[TokenMatcher]", None)
            case _:
                pass
        if not self.held:
            self.resolve(future, request.sampling.grammar.text)
        return future

    def resolve(self, future: Future[TokenMatcher], text: str) -> None:
        if text == "refused":
            future.set_exception(InvalidRequest("this is no word", field="grammar"))
        elif text == "fault":
            future.set_exception(OSError("the compiler broke"))
        else:
            future.set_result(self.make([int(part) for part in text.split(",")]))

    def close(self) -> None:
        self.closed = True


def make_loop(
    compiler: WordCompiler | None,
    *,
    num_blocks: int = 64,
    max_waiting: int = 1000,
    drafting: "DraftingRunner | None" = None,
    max_drafts: int = 0,
    mask_wait_s: float = 60.0,  # so that no row sits out on a busy machine
    wrap: Callable[[TokenBudgetScheduler], Scheduler] = lambda scheduler: scheduler,
) -> StepLoop:
    limits: dict[str, Any] = {"max_num_seqs": 8, "max_model_tokens": 48, "block_size_tokens": BLOCK}
    config = SchedulerConfig(num_blocks=num_blocks, max_step_tokens=64, max_drafts=max_drafts, **limits)
    ops = CpuOps()
    rank = CpuWorker(
        FlatModel(),
        kv_pool=KvPool(blocks=ops.zeros((1,)), layers={}),
        ops=ops,
        communicator=SoloCommunicator(),
        limits=WorkerLimits(num_token_ids=VOCAB, vocab_size=VOCAB, **limits),
    )
    info = EngineInfo(
        model="flat",
        family="flat",
        max_model_tokens=48,
        num_token_ids=VOCAB,
        eos_token_ids=(STOP,),
        block_size_tokens=BLOCK,
        num_blocks=num_blocks,
        max_num_seqs=8,
        max_waiting=max_waiting,
    )
    scheduler = wrap(TokenBudgetScheduler(config, FirstComeFirstServed(QueuePolicyConfig())))
    runner: Any = ThreadRunner([rank]) if drafting is None else drafting
    return StepLoop(
        info=info,
        scheduler=scheduler,
        runner=runner,
        grammar_compiler=compiler,
        mask_wait_s=mask_wait_s,
        max_drafts=max_drafts,
    )


def make_request(request_id: int, word: str | None, **sampling: Any) -> GenerateRequest:
    grammar = None if word is None else Grammar(kind=GrammarKind.REGEX, text=word)
    fields = {"max_tokens": 8, "temperature": 0.0, "stop_token_ids": (STOP,), **sampling}
    params = SamplingParams(**fields, grammar=grammar)
    return GenerateRequest(request_id=RequestId(request_id), prompt_token_ids=(1, 2, 3), sampling=params)


class DraftingRunner:
    """A flat model, as above, on a device whose drafter follows a word, with every so many a wrong id in it."""

    failure = None

    def __init__(self, drafts: Sequence[int], *, wrong_every: int) -> None:
        self.drafts = list(drafts)
        self.wrong_every = wrong_every
        self.given = 0
        self.places: dict[int, int] = {}  # slot -> tokens that it has sampled
        self.results: list[StepResult] = []

    def launch(self, plan: StepPlan) -> "DraftingRunner":
        self.places.update((start.slot, len(start.output_token_ids)) for start in plan.started)
        ends, rows, next_drafts = plan.num_host_tokens.cumsum().tolist(), list[list[int]](), dict[int, Any]()
        for row, slot in enumerate(plan.slots.tolist()):
            num_drafts = max(0, int(plan.max_new[row]) - 1)
            drafts = plan.token_ids[ends[row] - num_drafts : ends[row]].tolist()
            rows.append(self.sample(plan, row, drafts) if plan.max_new[row] else [])
            self.places[slot] += len(rows[-1])
            if plan.wants_drafts[row]:
                next_drafts[row] = self.draft(self.places[slot])
        counts = np.array([len(ids) for ids in rows], np.int32)
        token_ids = np.array([token_id for ids in rows for token_id in ids], np.int32)
        drafted = np.maximum(plan.max_new - 1, 0).astype(np.int32)
        self.results.append(
            StepResult(new_counts=counts, token_ids=token_ids, draft_counts=drafted, next_drafts=next_drafts)
        )
        return self

    def sample(self, plan: StepPlan, row: int, drafts: list[int]) -> list[int]:
        new_ids: list[int] = []
        for position, draft in enumerate([*drafts, None]):
            words = plan.token_masks.get((row, position))
            bits = np.ones(1, np.uint8) if words is None else np.unpackbits(words.view(np.uint8), bitorder="little")
            new_ids.append(int(np.flatnonzero(bits)[0]))
            if new_ids[-1] != draft:
                break
        return new_ids

    def draft(self, place: int) -> tuple[int, ...]:
        drafts = self.drafts[place : place + 5]
        for index in range(len(drafts)):
            self.given += 1
            if self.given % self.wrong_every == 0:
                drafts[index] += 1
        return tuple(drafts)

    def result(self) -> StepResult:
        return self.results.pop(0)

    def close(self) -> None: ...


class Client:
    """Submits, steps and sorts events by request, through a ledger."""

    def __init__(self, loop: StepLoop) -> None:
        self.loop = loop
        self.ledger = Ledger()
        self.events: dict[int, list[TokenEvent]] = {}

    def submit(self, request: GenerateRequest) -> None:
        self.ledger.open(request)
        self.events[request.request_id] = []
        self.take(self.loop.submit(request))

    def take(self, events: list[TokenEvent]) -> None:
        for event in self.ledger.record(events):
            self.events[event.request_id].append(event)

    def run(self) -> None:
        for _ in range(1000):
            if not self.loop.busy:
                break
            self.take(self.loop.step())
        assert not self.loop.busy
        assert len(self.ledger) == 0
        assert self.loop.stats().blocks_used == 0

    def tokens(self, request_id: int) -> list[int]:
        return [token for event in self.events[request_id] if isinstance(event, Tokens) for token in event.token_ids]


def test_masks_decide_each_token_and_the_stop() -> None:
    loop = make_loop(WordCompiler())
    client = Client(loop)
    client.submit(make_request(0, "7,8,33"))
    client.submit(make_request(1, "5"))
    client.submit(make_request(2, None))
    client.run()
    assert client.tokens(0) == [7, 8, 33]
    assert client.tokens(1) == [5]
    assert client.tokens(2) == [0] * 8
    assert client.events[0][-1] == Finished(RequestId(0), FinishReason.STOP, 3, 4, 0, STOP)
    loop.close()


def test_rows_without_a_grammar_keep_their_overlap() -> None:
    loop = make_loop(WordCompiler())
    client = Client(loop)
    client.submit(make_request(0, "4,4,4,4"))
    client.submit(make_request(1, None))
    client.run()
    assert loop.stats().steps == 9  # five masked rows in every other step; the other request's eight in the first eight
    loop.close()


def test_a_preempted_request_goes_on_where_its_matcher_stands() -> None:
    loop = make_loop(WordCompiler(), num_blocks=12)
    client = Client(loop)
    word = ",".join(str(10 + i) for i in range(20) if i != 3)
    for index in range(6):
        client.submit(make_request(index, word, max_tokens=30))
    client.run()
    assert loop.stats().preemptions > 0
    for index in range(6):
        assert client.tokens(index) == [int(part) for part in word.split(",")]
    loop.close()


def test_max_tokens_ends_a_request_inside_its_grammar() -> None:
    loop = make_loop(WordCompiler())
    client = Client(loop)
    client.submit(make_request(0, "7,8,9", max_tokens=2))
    client.run()
    assert client.tokens(0) == [7, 8]
    terminal = client.events[0][-1]
    assert isinstance(terminal, Finished)
    assert terminal.reason is FinishReason.LENGTH
    loop.close()


@pytest.mark.parametrize("wrong_every", [1, 2, 3, 1000])
def test_drafts_change_no_token_of_a_masked_request_and_save_steps(wrong_every: int) -> None:
    word = [14 + 7 * i % 24 for i in range(24)]
    runner = DraftingRunner(word, wrong_every=wrong_every)
    loop = make_loop(WordCompiler(), drafting=runner, max_drafts=4)
    client = Client(loop)
    for index in range(3):
        client.submit(make_request(index, ",".join(map(str, word)), max_tokens=40))
    client.run()
    for index in range(3):
        assert client.tokens(index) == word
        end = client.events[index][-1]
        assert isinstance(end, Finished)
        assert (end.reason, end.completion_tokens, end.stop_token_id) == (FinishReason.STOP, 25, STOP)
        assert end.rejected_drafts == 0  # a row ends before a draft that the grammar forbids
    stats = loop.stats()
    accepted = {1: 0, 2: 20, 3: 30, 1000: 57}[wrong_every]
    assert stats.spec_decode_num_accepted_tokens >= accepted
    assert (stats.spec_decode_num_accepted_tokens == 0) == (wrong_every == 1)
    loop.close()


def test_a_matcher_that_raises_on_a_draft_fails_its_request_alone_and_when_that_is_sampled() -> None:
    word = [7, 8, 13, 9]
    loop = make_loop(WordCompiler(), drafting=DraftingRunner(word, wrong_every=1000), max_drafts=4)
    client = Client(loop)
    client.submit(make_request(0, "7,8,13,9"))
    client.submit(make_request(1, "7,8,12"))
    client.run()
    assert client.events[0][-1] == Failed(
        RequestId(0), FailureKind.INTERNAL, "the grammar matcher failed on this request"
    )
    assert client.tokens(1) == [7, 8, 12]
    loop.close()


# --- restrictions ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"allowed_token_ids": (9, 38)}, [9] * 6),
        ({"bad_words": ((0,), (1,))}, [2] * 6),
        ({"bad_words": ((0, 0),)}, [0, 1, 0, 1, 0, 1]),
        ({"bad_words": ((0, 0, 0), (0, 1, 0))}, [0, 0, 1, 1, 0, 0]),
        ({"allowed_token_ids": (5, 9), "bad_words": ((5, 5), (9, 5))}, [5, 9, 9, 9, 9, 9]),
        ({"allowed_token_ids": (5, 9), "bad_words": ((5,),)}, [9] * 6),
        ({"allowed_token_ids": (5, 9), "logit_bias": {5: float("-inf")}}, [9] * 6),
        ({"allowed_token_ids": (STOP, 9), "logit_bias": {STOP: 1.0}, "min_tokens": 2}, [9, 9]),
        ({"allowed_token_ids": (STOP,)}, []),
    ],
)
def test_restrictions_need_no_compiler_and_decide_each_token(fields: dict[str, Any], said: list[int]) -> None:
    loop = make_loop(None)
    client = Client(loop)
    client.submit(make_request(0, None, max_tokens=6, **fields))
    client.submit(make_request(1, None))
    client.run()
    assert client.tokens(0) == said
    assert client.tokens(1) == [0] * 8
    loop.close()


@pytest.mark.parametrize("wrong_every", [1, 3, 1000])
def test_drafts_change_no_token_of_a_restricted_request(wrong_every: int) -> None:
    said = [0, 1, 0, 1, 0, 1, 0, 1]
    loop = make_loop(None, drafting=DraftingRunner(said, wrong_every=wrong_every), max_drafts=4)
    client = Client(loop)
    client.submit(make_request(0, None, bad_words=((0, 0),)))
    client.run()
    assert client.tokens(0) == said
    loop.close()


def test_restrictions_and_a_grammar_both_hold() -> None:
    loop = make_loop(WordCompiler())
    client = Client(loop)
    client.submit(make_request(0, "7,8,33", allowed_token_ids=(7, 8, 33, STOP)))
    client.submit(make_request(1, "7,8,33", bad_words=((7, 8),)))
    client.submit(make_request(2, "7,8", allowed_token_ids=(7, 8)))
    client.run()
    assert client.tokens(0) == [7, 8, 33]
    assert client.tokens(1) == [7]
    assert client.events[1][-1] == Failed(
        RequestId(1), FailureKind.INVALID, "bad_words and the grammar leave no token to sample after 1 tokens"
    )
    assert client.tokens(2) == [7, 8]
    assert isinstance(client.events[2][-1], Failed)
    loop.close()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"allowed_token_ids": (STOP,), "min_tokens": 2},
            "allowed_token_ids and min_tokens leave no token to sample after 0 tokens",
        ),
        ({"allowed_token_ids": (VOCAB,)}, f"allowed_token_ids names a token id beyond the model's {VOCAB} tokens"),
        ({"bad_words": ((1, VOCAB),)}, f"bad_words names a token id beyond the model's {VOCAB} tokens"),
    ],
)
def test_restrictions_that_leave_nothing_fail_their_request_alone(fields: dict[str, Any], message: str) -> None:
    loop = make_loop(None)
    client = Client(loop)
    client.submit(make_request(0, None, **fields))
    client.submit(make_request(1, None))
    client.run()
    assert client.events[0][-1] == Failed(RequestId(0), FailureKind.INVALID, message)
    assert client.tokens(1) == [0] * 8
    loop.close()


def test_a_restricted_request_goes_on_after_preemption() -> None:
    loop = make_loop(None, num_blocks=6)
    client = Client(loop)
    for number in range(3):
        client.submit(make_request(number, None, max_tokens=16, bad_words=((0, 0),)))
    client.run()
    assert loop.stats().preemptions > 0
    assert [client.tokens(number) for number in range(3)] == [[0, 1] * 8] * 3
    loop.close()


# --- what fails -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "make", "kind", "message"),
    [
        ("refused", WordMatcher, FailureKind.INVALID, "this is no word"),
        ("fault", WordMatcher, FailureKind.INTERNAL, "the grammar compiler failed on this request"),
        ("raises", WordMatcher, FailureKind.INTERNAL, "the grammar compiler failed on this request"),
        ("exits", WordMatcher, FailureKind.INTERNAL, "the grammar compiler failed on this request"),
        ("no future", WordMatcher, FailureKind.INTERNAL, "the grammar compiler failed on this request"),
        ("7,8", NoIdentity, FailureKind.INTERNAL, "the grammar compiler failed on this request"),
        ("7,13,8", WordMatcher, FailureKind.INTERNAL, "the grammar matcher failed on this request"),
        ("7,8", FillFails, FailureKind.INTERNAL, "the grammar matcher failed on this request"),
        ("7,-1", WordMatcher, FailureKind.INVALID, "the grammar allows no token after what was generated"),
    ],
)
def test_a_grammar_that_fails_costs_its_request_alone(
    word: str, make: Callable[[Sequence[int]], TokenMatcher], kind: FailureKind, message: str
) -> None:
    loop = make_loop(WordCompiler(make=make))
    client = Client(loop)
    client.submit(make_request(0, word))
    client.submit(make_request(1, None))
    client.run()
    assert client.events[0][-1] == Failed(RequestId(0), kind, message)
    assert client.tokens(1) == [0] * 8
    loop.close()


def test_a_slow_grammar_holds_up_nobody_and_its_request_counts_its_wait() -> None:
    compiler = WordCompiler(held=True)
    loop = make_loop(compiler)
    client = Client(loop)
    client.submit(make_request(0, "7"))
    client.submit(make_request(1, None, max_tokens=2))
    while loop.stats().running or loop.stats().waiting:
        client.take(loop.step())
    assert client.tokens(1) == [0, 0]
    assert loop.busy
    assert client.events[0] == []
    compiler.resolve(compiler.futures[0], "7")
    client.run()
    assert client.tokens(0) == [7]
    assert isinstance(client.events[0][0], Scheduled)
    loop.close()
    assert compiler.closed


def test_an_abort_while_the_grammar_compiles_ends_the_request() -> None:
    compiler = WordCompiler(held=True)
    loop = make_loop(compiler)
    client = Client(loop)
    client.submit(make_request(0, "7"))
    client.take(loop.abort(RequestId(0)))
    assert client.events[0] == [Finished(RequestId(0), FinishReason.ABORT, 3, 0, 0)]
    assert compiler.futures[0].cancelled()
    assert not loop.busy
    loop.close()


def test_mask_words_covers_every_id() -> None:
    assert [mask_words(count) for count in (1, 32, 33)] == [1, 1, 2]


def test_requests_that_wait_for_their_grammar_are_bounded() -> None:
    compiler = WordCompiler(held=True)
    loop = make_loop(compiler, max_waiting=2)
    client = Client(loop)
    for number in range(3):
        client.submit(make_request(number, "7"))
    (refusal,) = client.events[2]
    assert isinstance(refusal, Failed)
    assert (refusal.kind, "2 requests wait for their grammar" in refusal.message) == (FailureKind.OVERLOADED, True)
    for future in compiler.futures:
        compiler.resolve(future, "7")
    client.run()
    assert [client.tokens(number) for number in range(2)] == [[7], [7]]
    loop.close()
