"""Which data-parallel rank gets a request: the one with its prefix, unless another would be done with it first."""

from collections.abc import Sequence

import numpy as np

from openinfer_core import GenerateRequest, RequestId, SamplingParams
from openinfer_core.queue_policies import FirstComeFirstServed
from openinfer_core.scheduling import QueuePolicyConfig, SchedulerConfig, StepResult
from openinfer_engine.data_parallel.routing import OPEN_REQUEST_TOKENS, UNCACHED_WEIGHT, RankRouter, SharesDigests
from openinfer_engine.kv_tiers import TierContents
from openinfer_engine.scheduler import TokenBudgetScheduler
from openinfer_kv_cache import Digest, PrefixHasher, StoredBlocks

HASHER = PrefixHasher(16, key=bytes(16))


def make_router(num_ranks: int = 2, *, num_blocks: int = 100) -> RankRouter:
    return RankRouter([None] * num_ranks, num_blocks=num_blocks, hasher=HASHER)


def request(request_id: int, *, prompt: int, tokens: int = 320, salt: str | None = None) -> GenerateRequest:
    """Prompts of one number are equal as far as they go."""
    return GenerateRequest(
        request_id=RequestId(request_id),
        prompt_token_ids=tuple(1000 * prompt + place for place in range(tokens)),
        sampling=SamplingParams(max_tokens=1),
        cache_salt=salt,
    )


def test_new_prompts_spread() -> None:
    router = make_router(3)
    assert sorted(router.choose(request(i, prompt=i)) for i in range(3)) == [0, 1, 2]


def test_a_prefix_stays_with_its_rank_also_while_it_is_computed() -> None:
    router = make_router()
    first = router.choose(request(0, prompt=1))
    assert router.choose(request(1, prompt=1, tokens=330)) == first
    for request_id in (0, 1):
        router.ended(RequestId(request_id))
    assert router.choose(request(2, prompt=2)) != first  # all are idle, and that one's pool is empty
    assert router.choose(request(3, prompt=1, tokens=400)) == first


def test_turns_of_a_lone_session_never_change_their_rank() -> None:
    router = make_router(4)
    ranks = set[int]()
    for turn in range(20):
        ranks.add(router.choose(request(turn, prompt=1, tokens=100 * (turn + 1))))
        router.ended(RequestId(turn))
    assert len(ranks) == 1


def test_another_salt_shares_nothing() -> None:
    router = make_router()
    first = router.choose(request(0, prompt=1, salt="a"))
    assert router.choose(request(1, prompt=1, salt="b")) != first


def test_a_hot_prefix_spreads_when_its_rank_has_more_to_do_than_it_takes_to_compute_it() -> None:
    router = make_router()
    ranks = list[int]()
    for request_id in range(40):
        ranks.append(router.choose(request(request_id, prompt=1)))
        router.shown(RequestId(request_id))  # nothing is left to compute: what counts is that they are open
    alone = next(place for place, rank in enumerate(ranks) if rank != ranks[0])
    assert (alone - 1) * OPEN_REQUEST_TOKENS < 320 * UNCACHED_WEIGHT <= (alone + 1) * OPEN_REQUEST_TOKENS
    assert abs(ranks.count(0) - ranks.count(1)) <= alone


def test_what_was_computed_counts_no_longer() -> None:
    router = make_router()
    first = router.choose(request(0, prompt=1, tokens=3200))
    assert router.choose(request(1, prompt=2)) != first
    router.shown(RequestId(0))
    assert router.choose(request(2, prompt=3)) == first


def test_an_ended_request_is_no_rank_s() -> None:
    router = make_router()
    rank = router.choose(request(0, prompt=1))
    assert router.rank_of(RequestId(0)) == rank
    assert router.open_ids(rank) == {RequestId(0)}
    router.ended(RequestId(0))
    router.ended(RequestId(0))
    router.shown(RequestId(0))
    assert router.rank_of(RequestId(0)) is None
    assert not router.open_ids(rank)


def test_no_more_is_remembered_than_a_pool_holds() -> None:
    router = make_router(num_blocks=20)
    first = router.choose(request(0, prompt=1))
    second = router.choose(request(1, prompt=2))
    assert second != first
    third = router.choose(request(2, prompt=3))
    for request_id in range(3):
        router.ended(RequestId(request_id))
    # The rank that had two of these prompts has forgotten the first of them, and was sent more than the other.
    assert third == first
    assert router.choose(request(3, prompt=1)) == second


def test_flushed_caches_hold_nothing() -> None:
    router = make_router()
    router.choose(request(0, prompt=1))
    other = router.choose(request(1, prompt=2))
    for request_id in (0, 1):
        router.ended(RequestId(request_id))
    assert router.choose(request(2, prompt=2)) == other == 1
    router.ended(RequestId(2))
    router.choose(request(3, prompt=4))
    router.ended(RequestId(3))
    router.choose(request(4, prompt=5, tokens=640))
    router.ended(RequestId(4))
    assert router.choose(request(5, prompt=2)) == other  # which was sent more
    router.ended(RequestId(5))
    router.forget()
    assert router.choose(request(6, prompt=2)) != other


def test_a_prefix_that_the_tiers_of_a_rank_tell_of_goes_there() -> None:
    """Without having been sent there: an earlier engine, or another one, left it."""
    tiers = [TierContents(), TierContents()]
    router = RankRouter(tiers, num_blocks=100, hasher=HASHER)
    left = request(0, prompt=7)
    tiers[1].stored(HASHER.chain(HASHER.root(), left.prompt_token_ids))
    assert router.choose(left) == 1
    router.ended(left.request_id)
    router.forget()  # of pools alone
    assert router.choose(request(1, prompt=7)) == 1
    salted = request(2, prompt=7, salt="another tenant's")
    router.ended(RequestId(1))
    assert router.choose(salted) == 0


def test_a_prefix_may_begin_in_the_pool_and_go_on_in_the_tiers() -> None:
    tiers = [TierContents(), TierContents()]
    router = RankRouter(tiers, num_blocks=100, hasher=HASHER)
    for place in range(2):
        assert router.choose(request(place, prompt=place, tokens=160)) == place
    for place in range(2):
        router.ended(RequestId(place))
    longer = request(2, prompt=1, tokens=640)
    digests = HASHER.chain(HASHER.root(), longer.prompt_token_ids)
    tiers[0].stored(digests[:20])
    tiers[1].stored(digests[10:])
    assert router.choose(longer) == 1


class Stored:
    """A listener that keeps the digests of what can be found."""

    def __init__(self) -> None:
        self.digests: list[Digest] = []

    def stored(self, blocks: StoredBlocks) -> None:
        self.digests += blocks.digests

    def removed(self, digests: Sequence[Digest]) -> None:
        raise AssertionError("there is room for all")

    def cleared(self) -> None:
        raise AssertionError("nothing is flushed")


def test_digests_of_the_router_are_those_of_the_scheduler_and_computed_once() -> None:
    config = SchedulerConfig(
        num_blocks=128,
        block_size_tokens=16,
        max_num_seqs=2,
        max_step_tokens=1024,
        max_model_tokens=2048,
        digest_key=bytes(16),
    )
    scheduler, stored = TokenBudgetScheduler(config, FirstComeFirstServed(QueuePolicyConfig())), Stored()
    assert isinstance(scheduler, SharesDigests)
    hasher = PrefixHasher(16, key=bytes(16))
    scheduler.share_digests(hasher)
    scheduler.listen(stored)
    asked = request(0, prompt=1, tokens=16 * 96 + 5, salt="a tenant's")
    RankRouter([None], num_blocks=100, hasher=hasher).choose(asked)
    scheduler.add(asked, now_s=0.0)
    while (plan := scheduler.plan(now_s=0.0)) is not None:
        token_ids = np.where(plan.max_new > 0, 7, -1).astype(np.int32)
        scheduler.apply(plan, StepResult.of_single_tokens(token_ids), now_s=0.0)
    routed = hasher.chain(hasher.root(cache_salt="a tenant's"), asked.prompt_token_ids)
    assert stored.digests == routed
    # what was found is the object that was computed; a sequence looks for its first blocks one by one
    assert all(mine is theirs for mine, theirs in zip(stored.digests[32:], routed[32:], strict=True))
