"""`KvTransfer`: which requests wait, for what, and what their answers say."""

import threading

import pytest

from openinfer_core import (
    Failed,
    FailureKind,
    Finished,
    FinishReason,
    GenerateRequest,
    InvalidRequest,
    RequestId,
    SamplingParams,
    Tokens,
)
from openinfer_engine.kv_transfer import Handovers, KvTransfer
from openinfer_kv_cache import BlockPool, PrefixHasher

BLOCK = 4
LAYOUT = "a layout"
HASHER = PrefixHasher(BLOCK, key=b"k" * 16, layout_digest=LAYOUT)
PROMPT = tuple(range(10))
CHAIN = HASHER.chain(HASHER.root(), PROMPT)
STORED = {"layout": LAYOUT, "tier": "t", "tokens": 8, "digest": CHAIN[1].hex()}


class NothingSaved:
    """A port whose saves end at once, complete."""

    begin_s = 0.0

    def save(self, digests, places):
        self.num_blocks = self.completed_blocks = len(digests)
        assert len(places) == self.num_blocks
        return self

    def is_over(self):
        return True


class Asked:
    """What tiers were asked for, by a thread that the test may hold."""

    def __init__(self):
        self.chains = []
        self.go = threading.Event()
        self.go.set()
        self.error = None

    def __call__(self, digests):
        self.go.wait(60)
        self.chains.append(list(digests))
        if self.error is not None:
            raise self.error


@pytest.fixture
def asked():
    each = Asked()
    yield each
    each.go.set()


@pytest.fixture
def now():
    return [0.0]


@pytest.fixture
def transfer(asked, now):
    pool = BlockPool(8, BLOCK)
    blocks = pool.allocate(2)
    pool.seal(blocks, CHAIN)
    pool.release(blocks)
    handovers = Handovers(scheduler=pool, port=NothingSaved(), block_bytes=1, num_blocks=8, timeout_s=60.0)
    made = KvTransfer(
        tier="t",
        layout_digest=LAYOUT,
        hasher=PrefixHasher(BLOCK, key=b"k" * 16, layout_digest=LAYOUT),
        handovers=handovers,
        look_up=asked,
        timeout_s=60.0,
        clock=lambda: now[0],
    )
    yield made
    made.close()


def request(transfer, number=1, **fields):
    return GenerateRequest(
        request_id=RequestId(number),
        prompt_token_ids=PROMPT,
        sampling=SamplingParams(max_tokens=1),
        transfer=transfer,
        **fields,
    )


def wait_for_ready(transfer):
    transfer.wait(60)
    return [each.request_id for each, _ in transfer.take_ready()]


@pytest.mark.parametrize("asks", [None, {}, {"do_remote_decode": False}])
def test_requests_that_ask_for_nothing_do_not_wait(transfer, asks):
    assert not transfer.take(request(asks))
    events = [Finished(RequestId(1), FinishReason.LENGTH, 10, 1, 0)]
    assert transfer.withhold(events) == events


def test_both_kinds_ask_the_tiers_first(transfer, asked):
    assert transfer.take(request({"do_remote_decode": True}, 1))
    assert wait_for_ready(transfer) == [1]
    assert transfer.take(
        request({"do_remote_prefill": True, "openinfer": {**STORED, "tokens": 4, "digest": CHAIN[0].hex()}}, 2)
    )
    assert wait_for_ready(transfer) == [2]
    assert transfer.take(request({"do_remote_prefill": True}, 3))  # of a proxy that keeps what it does not know
    assert wait_for_ready(transfer) == [3]
    assert asked.chains == [CHAIN, CHAIN[:1], CHAIN]


@pytest.mark.parametrize(
    "stored",
    [
        {**STORED, "layout": "another"},
        {**STORED, "digest": CHAIN[0].hex()},
        {**STORED, "digest": None},
        {**STORED, "tokens": 1 << 20},
    ],
)
def test_blocks_that_are_not_this_prompts_are_not_asked_for_and_counted(transfer, asked, stored):
    assert not transfer.take(request({"do_remote_prefill": True, "openinfer": stored}))
    assert asked.chains == []
    assert transfer.stats().mismatches == 1


def test_another_salt_is_another_prompt(transfer):
    assert not transfer.take(request({"do_remote_prefill": True, "openinfer": STORED}, cache_salt="s"))


def test_a_request_of_which_nothing_is_stored_does_not_wait(transfer):
    assert not transfer.take(request({"do_remote_prefill": True, "openinfer": {**STORED, "tokens": 0, "digest": None}}))
    assert transfer.stats().mismatches == 0


def test_a_tier_that_does_not_answer_in_time_is_not_waited_for(transfer, asked, now):
    asked.go.clear()
    assert transfer.take(request({"do_remote_prefill": True}))
    assert transfer.take_ready() == []
    now[0] = 61.0
    assert [each.request_id for each, _ in transfer.take_ready()] == [1]
    assert transfer.stats().late_look_ups == 1


@pytest.mark.parametrize("error", [ConnectionError("gone"), ValueError("a bug")])
def test_a_tier_that_raises_costs_a_computation(transfer, asked, error):
    asked.error = error
    assert transfer.take(request({"do_remote_prefill": True}))
    assert wait_for_ready(transfer) == [1]


@pytest.mark.parametrize(
    "asks",
    [
        {"do_remote_decode": True, "do_remote_prefill": True},
        {"do_remote_decode": "yes"},
        {"remote_host": "10.0.0.1"},
        {"do_remote_prefill": True, "openinfer": {**STORED, "tokens": -1}},
        {"do_remote_prefill": True, "openinfer": {**STORED, "digest": "../x"}},
    ],
)
def test_what_cannot_be_asked_is_refused(transfer, asks):
    with pytest.raises(InvalidRequest, match="transfer"):
        transfer.take(request(asks))


def test_the_end_of_a_prefill_is_withheld_and_then_says_what_is_stored(transfer):
    transfer.take(request({"do_remote_decode": True}))
    wait_for_ready(transfer)
    finished = Finished(RequestId(1), FinishReason.LENGTH, 10, 1, 0)
    tokens = Tokens(RequestId(1), (5,))
    assert transfer.withhold([tokens, finished]) == [tokens]
    assert transfer.open_ids == {1}
    (told,) = transfer.settle()
    assert told.transfer == {"do_remote_decode": False, "do_remote_prefill": True, "openinfer": STORED}
    assert (told.reason, told.prompt_tokens, told.completion_tokens) == (FinishReason.LENGTH, 10, 1)
    stats = transfer.stats()
    assert (stats.prompts, stats.tokens, stats.partial_prompts) == (1, 8, 0)
    assert transfer.withhold([told]) == [told]
    assert not transfer.is_busy


def test_failed_and_aborted_prefills_are_not_withheld(transfer):
    for number, event in enumerate(
        (
            Failed(RequestId(0), FailureKind.INTERNAL, "x"),
            Finished(RequestId(1), FinishReason.ABORT, 10, 0, 0),
        )
    ):
        transfer.take(request({"do_remote_decode": True}, number))
        wait_for_ready(transfer)
        assert transfer.withhold([event]) == [event]


def test_a_request_may_be_withdrawn_wherever_it_is(transfer, asked):
    asked.go.clear()
    transfer.take(request({"do_remote_prefill": True}, 1))
    assert transfer.withdraw(RequestId(1)) == Finished(RequestId(1), FinishReason.ABORT, 10, 0, 0)
    asked.go.set()
    transfer.take(request({"do_remote_decode": True}, 2))
    wait_for_ready(transfer)
    assert transfer.withdraw(RequestId(2)) is None  # it is the scheduler's now
    transfer.take(request({"do_remote_decode": True}, 3))
    wait_for_ready(transfer)
    assert transfer.withhold([Finished(RequestId(3), FinishReason.LENGTH, 10, 1, 0)]) == []
    assert transfer.withdraw(RequestId(3)).reason is FinishReason.ABORT
    assert not transfer.is_busy


def test_what_other_weights_computed_is_not_handed_on(transfer, asked):
    assert transfer.take(request({"do_remote_decode": True}, 1))
    assert wait_for_ready(transfer) == [1]
    transfer.renew("content x")
    assert transfer.withhold([Finished(RequestId(1), FinishReason.LENGTH, 10, 1, 0)]) == []
    (told,) = transfer.settle()
    assert told.transfer["openinfer"] == {"layout": LAYOUT, "tier": "t", "tokens": 0, "digest": None}
    assert not transfer.is_handing_over
    assert transfer.take(request({"do_remote_decode": True}, 2))
    assert wait_for_ready(transfer) == [2]
    assert not {*asked.chains[0]} & {*asked.chains[1]}
