"""First come first served, priority, and weighted fair share; all three pass the kit."""

from itertools import count
from operator import attrgetter

import pytest

from openinfer_core import GenerateRequest, RequestId, SamplingParams
from openinfer_core.plugins import QUEUE_POLICIES, find_plugin
from openinfer_core.queue_policies import MAX_INDEBTED_TENANTS, FairShare, FirstComeFirstServed, Priority
from openinfer_core.scheduling import QueuePolicyConfig, WaitingRequest
from openinfer_core.testing.queue_policy import QueuePolicyFactory, check_queue_policy, serving_order

CONFIG = QueuePolicyConfig()


def waiting(one: GenerateRequest, arrival: int) -> WaitingRequest:
    return WaitingRequest(request=one, arrival=arrival)


def request(request_id: int, *, tenant: str = "", priority: int = 0, tokens: int = 10) -> GenerateRequest:
    return GenerateRequest(
        request_id=RequestId(request_id),
        prompt_token_ids=(1,) * (tokens - 1),
        sampling=SamplingParams(max_tokens=1),
        tenant=tenant,
        priority=priority,
    )


@pytest.mark.parametrize("policy", [FirstComeFirstServed, Priority, FairShare], ids=attrgetter("__name__"))
def test_policy_conforms(policy: QueuePolicyFactory) -> None:
    check_queue_policy(policy)


@pytest.mark.parametrize(
    ("name", "policy"), [("fcfs", FirstComeFirstServed), ("priority", Priority), ("fair-share", FairShare)]
)
def test_policy_is_found_by_name(name: str, policy: QueuePolicyFactory) -> None:
    assert find_plugin(QUEUE_POLICIES, name).load() is policy


def test_fcfs_serves_in_order_of_arrival_whatever_the_priority() -> None:
    requests = [request(7, priority=3), request(3, priority=-3), request(5)]
    assert serving_order(FirstComeFirstServed(CONFIG), requests) == [7, 3, 5]


def test_priority_serves_smaller_numbers_first_and_equals_in_order_of_arrival() -> None:
    requests = [request(0, priority=1), request(1), request(2, priority=-5), request(3), request(4, priority=-5)]
    assert serving_order(Priority(CONFIG), requests) == [2, 4, 1, 3, 0]


def test_fair_share_alternates_between_tenants_that_ask_for_the_same() -> None:
    requests = [request(i, tenant="a") for i in range(3)] + [request(i, tenant="b") for i in range(3, 6)]
    assert serving_order(FairShare(CONFIG), requests) == [0, 3, 1, 4, 2, 5]


def test_fair_share_counts_tokens_not_requests() -> None:
    large = [request(i, tenant="large", tokens=40) for i in range(2)]
    small = [request(i, tenant="small", tokens=10) for i in range(2, 8)]
    assert serving_order(FairShare(CONFIG), large + small) == [0, 2, 3, 4, 5, 1, 6, 7]


def test_fair_share_gives_a_tenant_its_weight() -> None:
    policy = FairShare(QueuePolicyConfig(tenant_weights={"gold": 3.0}))
    requests = [request(i, tenant="gold" if i < 60 else "free") for i in range(120)]
    first_40 = serving_order(policy, requests)[:40]
    assert sum(request_id < 60 for request_id in first_40) == 30


def test_fair_share_gives_no_credit_for_having_been_idle() -> None:
    policy = FairShare(CONFIG)
    serving_order(policy, [request(i, tenant="busy") for i in range(20)])
    keys = {
        request_id: policy.key(waiting(request(request_id, tenant="busy" if request_id < 104 else "late"), request_id))
        for request_id in range(100, 108)
    }
    assert sorted(keys, key=keys.__getitem__) == [104, 100, 105, 101, 106, 102, 107, 103]


@pytest.mark.parametrize("num_new", [1, 5])
def test_fair_share_serves_a_tenant_next_to_ever_new_ones(num_new: int) -> None:
    """Each request of a tenant that was never seen starts at the virtual time, which has to pass nevertheless."""
    policy = FairShare(CONFIG)
    queued: dict[int, GenerateRequest] = {}

    def arrive(tenant: str) -> None:
        one = request(next(numbers), tenant=tenant)
        policy.key(waiting(one, one.request_id))
        queued[one.request_id] = one

    numbers = count()
    for i in range(num_new):
        arrive(f"new {i}")
    arrive("known")
    served: list[str] = []
    for i in range(200):
        one = queued.pop(policy.next(frozenset()))
        policy.admitted(one)
        policy.ended(one, generated_tokens=1)
        served.append(one.tenant)
        arrive(one.tenant if one.tenant == "known" else f"newer {i}")
    assert served.count("known") == pytest.approx(200 / (num_new + 1), abs=3)


def test_fair_share_refunds_a_withdrawn_request() -> None:
    policy = FairShare(CONFIG)
    huge = request(0, tenant="a", tokens=1000)
    policy.key(waiting(huge, 0))
    policy.withdrawn(huge)
    assert serving_order(policy, [request(1, tenant="a"), request(2, tenant="b")]) == [1, 2]


def test_fair_share_withdraws_a_request_of_a_tenant_it_has_forgotten() -> None:
    policy = FairShare(CONFIG)
    first, second = request(0, tenant="a"), request(1, tenant="a")
    policy.key(waiting(first, 0))
    policy.key(waiting(second, 1))
    policy.withdrawn(first)  # now the tenant's debt ends where its second request starts
    others = [request(i, tenant="b", tokens=20) for i in range(2, 20)]
    serving_order(policy, others)
    serving_order(policy, [request(i, tenant=str(i)) for i in range(100, 200)])  # tenants enough for a sweep
    policy.withdrawn(second)
    assert len(serving_order(policy, [request(200, tenant="a"), request(201, tenant="b")])) == 2


def test_fair_share_remembers_a_bounded_number_of_tenants() -> None:
    policy = FairShare(QueuePolicyConfig(tenant_weights={"heavy": 1e6}))
    policy.key(waiting(request(0, tenant="heavy"), 0))  # next to which what others do takes no time: all stay in debt
    for i in range(1, 3 * MAX_INDEBTED_TENANTS):
        one = request(i, tenant=str(i))
        policy.key(waiting(one, i))
        policy.admitted(one)
    assert MAX_INDEBTED_TENANTS // 2 <= policy.num_tenants <= 2 * MAX_INDEBTED_TENANTS


def test_fair_share_serves_one_tenant_as_it_came_whatever_was_withdrawn_or_ended() -> None:
    policy = FairShare(CONFIG)
    requests = [request(i, tokens=10 + i) for i in range(10)]
    keys = {i: policy.key(waiting(requests[i], i)) for i in range(5)}
    for i in (0, 1, 3):
        policy.withdrawn(requests[i])
        del keys[i]
    policy.admitted(requests[2])
    policy.ended(requests[2], generated_tokens=0)
    keys |= {i: policy.key(waiting(requests[i], i)) for i in range(5, 10)}
    assert sorted(keys, key=keys.__getitem__) == [2, 4, 5, 6, 7, 8, 9]


def test_fair_share_pays_back_all_of_what_was_withdrawn_when_nothing_waits() -> None:
    policy = FairShare(CONFIG)
    for i in range(3):
        policy.key(waiting(request(i, tenant="a", tokens=1000), i))
    for i in range(3):
        policy.withdrawn(request(i, tenant="a", tokens=1000))
    assert policy.key(waiting(request(3, tenant="a"), 3)) == (0.0, 3)


def unbounded(request_id: int, tenant: str, max_tokens: int) -> GenerateRequest:
    return GenerateRequest(
        request_id=RequestId(request_id),
        prompt_token_ids=(1,) * 10,
        sampling=SamplingParams(max_tokens=max_tokens),
        tenant=tenant,
    )


def test_fair_share_does_not_take_a_whole_context_for_what_will_be_generated() -> None:
    """A client that gives no `max_tokens` may have as many as the context; it is one of few that need them."""
    policy = FairShare(CONFIG)
    longest = [unbounded(i, "a", 100_000) for i in range(10)]
    bounded = [unbounded(i, "b", 522) for i in range(10, 20)]
    assert serving_order(policy, longest + bounded)[:4] == [0, 10, 1, 11]


@pytest.mark.parametrize(("generated_tokens", "start"), [(2000, 2010.0), (30, 40.0)])
def test_fair_share_charges_what_was_generated_when_it_is_known(generated_tokens: int, start: float) -> None:
    policy = FairShare(CONFIG)
    one = unbounded(0, "a", 100_000)
    policy.key(waiting(one, 0))
    policy.admitted(one)
    policy.ended(one, generated_tokens=generated_tokens)
    assert policy.key(waiting(request(1, tenant="a"), 1)) == (start, 1)


def choice(request_id: int, number: int, *, tenant: str = "a") -> GenerateRequest:
    return GenerateRequest(
        request_id=RequestId(request_id),
        prompt_token_ids=(1,) * 10,
        sampling=SamplingParams(max_tokens=1),
        tenant=tenant,
        choice=number,
    )


def served_by_next(policy: FairShare, by_id: dict[int, GenerateRequest], *, full: frozenset[str]) -> list[int]:
    served: list[int] = []
    while by_id:
        served.append(policy.next(full))
        policy.admitted(by_id.pop(served[-1]))
    return served


def test_fair_share_is_asked_for_the_next_as_the_keys_say_without_choices() -> None:
    policy = FairShare(CONFIG)
    requests = {i: request(i, tenant="abc"[i * i % 3], tokens=2 + i * 7 % 31) for i in range(60)}
    keys = {i: policy.key(waiting(each, i)) for i, each in requests.items()}
    for i in (5, 30, 31):
        policy.withdrawn(requests.pop(i))
        del keys[i]
    assert served_by_next(policy, requests, full=frozenset()) == sorted(keys, key=keys.__getitem__)


def test_fair_share_passes_over_full_tenants_while_others_wait() -> None:
    policy = FairShare(CONFIG)
    requests = {i: request(i, tenant="ab"[i % 2]) for i in range(6)}
    for i, each in requests.items():
        policy.key(waiting(each, i))
    assert served_by_next(policy, requests, full=frozenset("a")) == [1, 3, 5, 0, 2, 4]


def test_fair_share_takes_many_choices_for_one_request() -> None:
    policy = FairShare(CONFIG)
    requests = {i: choice(i, i) for i in range(16)} | {i: choice(i, 0) for i in range(16, 20)}
    for i, each in requests.items():
        policy.key(waiting(each, i))
    assert served_by_next(policy, requests, full=frozenset())[:9] == [0, 16, 1, 17, 2, 18, 3, 19, 4]
