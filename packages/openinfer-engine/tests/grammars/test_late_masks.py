"""Masks next to the loop: rows sit out, equal states share, what fails or is aborted harms no other."""

import gc
import threading
import weakref
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import pytest

from openinfer_core import Failed, FailureKind, Finished, FinishReason, InvalidRequest, RequestId
from openinfer_core.grammars import MaskWords, TokenMatcher
from openinfer_core.plugins import place_of
from openinfer_core.scheduling import SchedulerCapabilities, StepPlan
from openinfer_engine.grammars import masking
from openinfer_engine.scheduler import TokenBudgetScheduler

from .test_masking import Client, DraftingRunner, WordCompiler, WordMatcher, make_loop, make_request


class Gate:
    """Masks after the first token wait until it opens."""

    def __init__(self) -> None:
        self.opened, self.entered = threading.Event(), threading.Event()

    def make(self, word: Sequence[int]) -> TokenMatcher:
        return GatedMatcher(word, self)


class GatedMatcher(WordMatcher):
    def __init__(self, word: Sequence[int], gate: Gate) -> None:
        super().__init__(word)
        self.gate = gate

    def fill(self, words: MaskWords) -> None:
        if self.accepted:
            self.gate.entered.set()
            assert self.gate.opened.wait(60)
        super().fill(words)


class SharingMatcher(WordMatcher):
    """Says what it was made from, and notes where masks were computed."""

    def __init__(self, word: Sequence[int], filled: list[tuple[int, ...]]) -> None:
        super().__init__(word)
        self.mask_identity = repr(word).encode()
        self.filled = filled

    def fill(self, words: MaskWords) -> None:
        self.filled.append(tuple(self.accepted))
        super().fill(words)


def step_until_entered(client: Client, gate: Gate) -> None:
    while not gate.entered.is_set():
        client.take(client.loop.step())


# --- sitting out ----------------------------------------------------------------------------------------


def test_rows_without_a_grammar_end_while_a_mask_does_not_come() -> None:
    gate = Gate()
    loop = make_loop(WordCompiler(make=gate.make), mask_wait_s=0.0)
    client = Client(loop)
    client.submit(make_request(0, "7,8,9"))
    client.submit(make_request(1, None, max_tokens=30))
    while not any(isinstance(event, Finished) for event in client.events[1]):
        client.take(loop.step())
    assert client.tokens(1) == [0] * 30
    assert client.tokens(0) == [7]
    stats = loop.stats()
    assert stats.running == 1
    assert stats.grammars is not None
    assert stats.grammars.rows_sat_out > 10
    gate.opened.set()
    client.run()
    assert client.tokens(0) == [7, 8, 9]
    stats = loop.stats()
    assert stats.grammars is not None
    assert stats.grammars.mask_s["late"] > 0
    loop.close()


def test_a_preempted_request_whose_mask_does_not_come_is_passed_over() -> None:
    gate = Gate()
    loop = make_loop(WordCompiler(make=gate.make), num_blocks=12, mask_wait_s=0.0)
    client = Client(loop)
    client.submit(make_request(9, None, max_tokens=40))
    client.submit(make_request(0, "7,8,9"))
    for number in range(1, 5):
        client.submit(make_request(number, None, max_tokens=30))
    while not all(any(isinstance(event, Finished) for event in client.events[number]) for number in (9, 1, 2, 3, 4)):
        client.take(loop.step())
    assert loop.stats().preemptions > 0
    assert client.tokens(0) == [7]
    gate.opened.set()
    client.run()
    assert client.tokens(0) == [7, 8, 9]
    loop.close()


class PlansAll:
    """A scheduler as it was before `HoldsRows`: it plans every row. Masks come once it has."""

    def __init__(self, scheduler: TokenBudgetScheduler, gate: Gate) -> None:
        self._scheduler, self._gate = scheduler, gate
        self.capabilities: SchedulerCapabilities = scheduler.capabilities
        self.add, self.abort, self.apply, self.stats = scheduler.add, scheduler.abort, scheduler.apply, scheduler.stats

    def plan(self, *, now_s: float) -> StepPlan | None:
        plan = self._scheduler.plan(now_s=now_s)
        self._gate.opened.set()
        return plan

    @property
    def unfinished_ids(self) -> AbstractSet[RequestId]:
        return self._scheduler.unfinished_ids


@pytest.mark.parametrize("max_drafts", [0, 4])
def test_a_scheduler_that_cannot_do_without_a_row_has_its_mask_waited_for(max_drafts: int) -> None:
    gate = Gate()
    drafting = DraftingRunner([7, 8, 9], wrong_every=2) if max_drafts else None
    loop = make_loop(
        WordCompiler(make=gate.make),
        mask_wait_s=0.0,
        wrap=lambda scheduler: PlansAll(scheduler, gate),
        drafting=drafting,
        max_drafts=max_drafts,
    )
    client = Client(loop)
    client.submit(make_request(0, "7,8,9"))
    client.submit(make_request(1, "7,8,9"))
    client.run()
    assert client.tokens(0) == client.tokens(1) == [7, 8, 9]
    stats = loop.stats()
    assert stats.grammars is not None
    assert stats.grammars.rows_sat_out == 0
    loop.close()


# --- sharing --------------------------------------------------------------------------------------------


def test_sixteen_equal_outputs_cost_one_mask_for_each_token() -> None:
    filled: list[tuple[int, ...]] = []
    loop = make_loop(WordCompiler(make=lambda word: SharingMatcher(word, filled)))
    client = Client(loop)
    for number in range(16):
        client.submit(make_request(number, "7,8,33"))
    client.run()
    assert all(client.tokens(number) == [7, 8, 33] for number in range(16))
    assert filled == [(), (7,), (7, 8), (7, 8, 33)]
    stats = loop.stats().grammars
    assert stats is not None
    assert (stats.masks_computed, stats.masks_shared) == (4, 60)
    loop.close()


@pytest.mark.parametrize("wrong_every", [1, 2, 1000])
def test_shared_masks_along_drafts_change_no_token(wrong_every: int) -> None:
    word, filled = [14 + 7 * i % 24 for i in range(24)], list[tuple[int, ...]]()
    runner = DraftingRunner(word, wrong_every=wrong_every)
    loop = make_loop(WordCompiler(make=lambda each: SharingMatcher(each, filled)), drafting=runner, max_drafts=4)
    client = Client(loop)
    for number in range(6):
        client.submit(make_request(number, ",".join(map(str, word)), max_tokens=40))
    client.run()
    assert all(client.tokens(number) == word for number in range(6))
    assert sorted(filled) == [tuple(word[:count]) for count in range(25)]
    loop.close()


def test_unequal_states_share_nothing() -> None:
    filled: list[tuple[int, ...]] = []
    loop = make_loop(WordCompiler(make=lambda word: SharingMatcher(word, filled)))
    client = Client(loop)
    words = ["7,8,9", "7,8,10", "8,7,11", "7", "7,7,7,9"]
    for number, word in enumerate(words):
        client.submit(make_request(number, word))
    client.submit(make_request(9, "7,8,9", bad_words=((9,),)))
    client.submit(make_request(10, "7,8,9", max_tokens=2))
    client.run()
    for number, word in enumerate(words):
        assert client.tokens(number) == [int(token) for token in word.split(",")]
    assert client.tokens(9) == [7, 8]
    assert isinstance(client.events[9][-1], Failed)
    assert client.tokens(10) == [7, 8]
    loop.close()


class FailsOnce(SharingMatcher):
    """Of equal matchers, the one that is asked first after a token raises."""

    num_asked = 0

    def __init__(self, word: Sequence[int], error: type[BaseException]) -> None:
        super().__init__(word, [])
        self.error = error

    def fill(self, words: MaskWords) -> None:
        if self.accepted and not FailsOnce.num_asked:
            FailsOnce.num_asked += 1
            raise self.error("it takes too long")
        super().fill(words)


class Panic(BaseException):
    """What Rust panics with is no `Exception`."""


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InvalidRequest, FailureKind.INVALID),
        (OSError, FailureKind.INTERNAL),
        (Panic, FailureKind.INTERNAL),
    ],
)
def test_what_one_of_equal_matchers_raises_ends_its_request_alone(
    error: type[BaseException], kind: FailureKind
) -> None:
    FailsOnce.num_asked = 0
    loop = make_loop(WordCompiler(make=lambda word: FailsOnce(word, error)))
    client = Client(loop)
    for number in range(5):
        client.submit(make_request(number, "7,8,33"))
    client.run()
    ends = [client.events[number][-1] for number in range(5)]
    failed = [number for number, end in enumerate(ends) if isinstance(end, Failed)]
    assert len(failed) == 1
    end = ends[failed[0]]
    assert isinstance(end, Failed)
    assert end.kind is kind
    assert all(client.tokens(number) == [7, 8, 33] for number in range(5) if number not in failed)
    loop.close()


# --- aborts ---------------------------------------------------------------------------------------------


class GatedSharing(GatedMatcher):
    mask_identity = b"one word"


def test_others_get_the_mask_of_a_request_that_is_aborted() -> None:
    gate = Gate()
    loop = make_loop(WordCompiler(make=lambda word: GatedSharing(word, gate)), mask_wait_s=0.0)
    client = Client(loop)
    for number in range(3):
        client.submit(make_request(number, "7,8,9"))
    step_until_entered(client, gate)
    client.take(loop.abort(RequestId(0)))
    gate.opened.set()
    client.run()
    end = client.events[0][-1]
    assert isinstance(end, Finished)
    assert end.reason is FinishReason.ABORT
    assert client.tokens(1) == client.tokens(2) == [7, 8, 9]
    loop.close()


def test_an_aborted_request_frees_its_matcher() -> None:
    gate = Gate()
    made: list[weakref.ref[TokenMatcher]] = []

    def make(word: Sequence[int]) -> TokenMatcher:
        matcher = GatedMatcher(word, gate)
        made.append(weakref.ref(matcher))
        return matcher

    compiler = WordCompiler(make=make)
    loop = make_loop(compiler, mask_wait_s=0.0)
    client = Client(loop)
    for number in range(3):
        client.submit(make_request(number, "7,8,9"))
    compiler.futures.clear()
    step_until_entered(client, gate)
    for number in range(3):
        client.take(loop.abort(RequestId(number)))
    gc.collect()
    alive = [ref for ref in made if ref() is not None]
    assert len(alive) <= 1  # that the thread is at
    gate.opened.set()
    client.run()
    loop.close()
    gc.collect()
    assert all(ref() is None for ref in made)


def test_a_request_can_be_aborted_before_its_first_mask() -> None:
    opened, entered = threading.Event(), threading.Event()

    class FirstMaskWaits(WordMatcher):
        def fill(self, words: MaskWords) -> None:
            entered.set()
            assert opened.wait(60)
            super().fill(words)

    loop = make_loop(WordCompiler(make=FirstMaskWaits), mask_wait_s=0.0)
    client = Client(loop)
    client.submit(make_request(0, "7"))
    assert entered.wait(60)
    assert loop.reconcile({RequestId(0)}) == []
    client.take(loop.abort(RequestId(0)))
    opened.set()
    client.run()
    assert client.events[0] == [Finished(RequestId(0), FinishReason.ABORT, 3, 0, 0)]
    loop.close()


# --- what is told ---------------------------------------------------------------------------------------


def test_a_mask_that_takes_long_is_told_as_a_slow_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masking, "SLOW_MASK_S", 0.0)
    gate = Gate()
    loop = make_loop(WordCompiler(make=gate.make), mask_wait_s=0.0)
    client = Client(loop)
    client.submit(make_request(0, "7,8,9"))
    step_until_entered(client, gate)
    slow = loop.stats().slow_call
    assert slow is not None
    assert (slow.plugin, slow.call, slow.group) == (place_of(WordCompiler), "fill", "openinfer.grammar_compilers")
    gate.opened.set()
    client.run()
    assert loop.stats().slow_call is None
    loop.close()
