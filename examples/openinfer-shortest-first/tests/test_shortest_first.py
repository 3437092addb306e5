"""The policy passes the kit, is found by its name, and does what it says in the default scheduler."""

from openinfer_core import GenerateRequest, RequestId, SamplingParams
from openinfer_core.plugins import QUEUE_POLICIES, find_plugin
from openinfer_core.scheduling import QueuePolicyConfig, SchedulerConfig
from openinfer_core.testing.queue_policy import check_queue_policy, serving_order
from openinfer_core.testing.scheduler_driver import SchedulerDriver
from openinfer_engine.scheduler import TokenBudgetScheduler
from openinfer_shortest_first import AGE_TOKENS, ShortestFirst


def make_request(request_id: int, *, tokens: int) -> GenerateRequest:
    return GenerateRequest(
        request_id=RequestId(request_id),
        prompt_token_ids=(request_id % 50,) * (tokens - 4),
        sampling=SamplingParams(max_tokens=4),
    )


def make_policy() -> ShortestFirst:
    return ShortestFirst(QueuePolicyConfig())


def test_policy_conforms() -> None:
    check_queue_policy(ShortestFirst)


def test_policy_is_found_by_its_name() -> None:
    assert find_plugin(QUEUE_POLICIES, "shortest-first").load() is ShortestFirst


def test_shortest_goes_first_and_equals_in_order_of_arrival() -> None:
    sizes = (2000, 500, 90, 500, 1000)
    requests = [make_request(index, tokens=tokens) for index, tokens in enumerate(sizes)]
    assert serving_order(make_policy(), requests) == [2, 1, 3, 4, 0]


def test_long_request_is_overtaken_a_bounded_number_of_times() -> None:
    long_tokens = 40 * AGE_TOKENS
    requests = [make_request(0, tokens=long_tokens)]
    requests += [make_request(index, tokens=5) for index in range(1, 100)]
    assert serving_order(make_policy(), requests).index(0) == 39


def test_short_requests_overtake_in_the_default_scheduler_and_all_are_served() -> None:
    config = SchedulerConfig(
        num_blocks=40, block_size_tokens=4, max_num_seqs=1, max_step_tokens=64, max_model_tokens=128
    )
    driver = SchedulerDriver(TokenBudgetScheduler, config, policy=make_policy())
    for index, tokens in enumerate((100, 120, 12, 90, 8)):
        driver.submit(make_request(index, tokens=tokens))
    started: list[int] = []
    while driver.scheduler.unfinished_ids:
        plan = driver.step()
        started += [start.request.request_id for start in plan.started] if plan else []
    driver.run()
    assert started == [2, 4, 0, 1, 3]  # keys 44, 72, 100, 136, 138
