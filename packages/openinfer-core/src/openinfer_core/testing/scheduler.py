"""Conformance of a `Scheduler`: `check_scheduler(factory)` runs every check; `SCHEDULER_CHECKS` lists them.

    @pytest.mark.parametrize("check", SCHEDULER_CHECKS, ids=attrgetter("__name__"))
    def test_my_scheduler_conforms(check):
        check(MyScheduler)

Each check drives schedulers on a `FakeDevice`, with and without overlap of steps. The traffic is random and the same
in every run. What is checked throughout is listed in `SchedulerDriver` and `FakeDevice`: limits, positions, KV
contents, slots, seeds, events, the queue policy's hooks, no wedge, nothing left over at the end.
"""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from openinfer_core.events import Failed, FailureKind, Scheduled
from openinfer_core.queue_policies import FairShare, FirstComeFirstServed, Priority
from openinfer_core.request import GenerateRequest, RequestId
from openinfer_core.sampling import Grammar, GrammarKind, SamplingParams
from openinfer_core.scheduling import QueuePolicy, QueuePolicyConfig, SchedulerConfig, StepPlan
from openinfer_core.testing import fake_model
from openinfer_core.testing.errors import require
from openinfer_core.testing.scheduler_driver import SchedulerDriver, SchedulerFactory

SchedulerCheck: TypeAlias = Callable[[SchedulerFactory], None]

OVERLAPS = (1, 2)  # steps in flight: without overlap and with it

# No compiler is asked, and the fake device heeds no mask.
_GRAMMAR = Grammar(kind=GrammarKind.REGEX, text=".*")

_POLICIES: tuple[Callable[[QueuePolicyConfig], QueuePolicy], ...] = (FirstComeFirstServed, Priority, FairShare)


def check_scheduler(factory: SchedulerFactory) -> None:
    """Runs all of `SCHEDULER_CHECKS`; `ConformanceError` if the scheduler does not conform."""
    for check in SCHEDULER_CHECKS:
        check(factory)


def check_random_traffic(factory: SchedulerFactory, *, seeds: Iterable[int] = range(12)) -> None:
    """Arrivals, aborts and failing rows at random, over random limits and policies."""
    for seed in seeds:
        for max_in_flight in OVERLAPS:
            rng = random.Random(seed)  # noqa: S311 - no secrets here
            policy = rng.choice(_POLICIES)(QueuePolicyConfig(tenant_weights={"gold": 4.0}))
            driver = SchedulerDriver(factory, _random_config(rng), policy=policy, max_in_flight=max_in_flight)
            _drive_at_random(driver, rng)
            _check_serves_on(driver)


def check_pressure(factory: SchedulerFactory) -> None:
    """Sequences that together outgrow the pool many times over: all are served, and a request afterwards too."""
    for max_in_flight in OVERLAPS:
        config = _config(num_blocks=10, block_size_tokens=2, max_num_seqs=6, max_step_tokens=8, max_model_tokens=20)
        driver = SchedulerDriver(factory, config, max_in_flight=max_in_flight)
        requests = [_request(index, prompt=(index, 1, 2), max_tokens=15) for index in range(12)]
        for request in requests:
            _submit_served(driver, request)
        driver.run()
        _check_served_in_full(driver, requests)
        _check_serves_on(driver)


def check_refusals(factory: SchedulerFactory) -> None:
    """What can never be served is refused by `add`, with a message, and harms no other request."""
    for max_in_flight in OVERLAPS:
        config = _config(num_blocks=8, block_size_tokens=4, max_model_tokens=64)
        driver = SchedulerDriver(factory, config, max_in_flight=max_in_flight)
        too_long = _request(0, prompt=(1,) * 65, max_tokens=1)
        too_big_for_pool = _request(1, prompt=(1,) * 40, max_tokens=8)
        grows_too_big = _request(2, prompt=(1,) * 8, max_tokens=40)
        fits = _request(3, prompt=(1,) * 8, max_tokens=8)
        _submit_served(driver, fits)
        for request in (too_long, too_big_for_pool, grows_too_big):
            terminal = driver.submit(request)
            is_refusal = isinstance(terminal, Failed) and terminal.kind is FailureKind.INVALID and terminal.message
            require(is_refusal, f"request {request.request_id} can never fit; add answered {terminal}")
        driver.run()
        _check_served_in_full(driver, [fits])


def check_context_length(factory: SchedulerFactory) -> None:
    """A request that asks for more than the context holds ends with `length` at its bound."""
    for max_in_flight in OVERLAPS:
        driver = SchedulerDriver(factory, _config(max_model_tokens=24), max_in_flight=max_in_flight)
        requests = [_request(index, prompt=(index,) * (20 + index), max_tokens=50) for index in range(4)]
        for request in requests:
            _submit_served(driver, request)
        driver.run()
        _check_served_in_full(driver, requests)


def check_full_queue(factory: SchedulerFactory) -> None:
    """Beyond `max_waiting`, `add` answers `overloaded`; what was taken is served, and there is room again later."""
    driver = SchedulerDriver(factory, _config(max_waiting=3))
    terminals = [driver.submit(_request(index, prompt=(index, 5), max_tokens=4)) for index in range(6)]
    require(terminals[:3] == [None] * 3, f"max_waiting is 3; add answered {terminals[:3]} to the first three requests")
    for terminal in terminals[3:]:
        is_overload = isinstance(terminal, Failed) and terminal.kind is FailureKind.OVERLOADED
        require(is_overload, f"the queue is full; add answered {terminal}")
    driver.run()
    _check_serves_on(driver)


def check_queue_order(factory: SchedulerFactory) -> None:
    """Requests are admitted in the order of the policy's keys, also where only one after the head would fit."""
    for max_in_flight in OVERLAPS:
        config = _config(num_blocks=16, block_size_tokens=2, max_num_seqs=4, max_step_tokens=8, max_model_tokens=32)
        driver = SchedulerDriver(factory, config, policy=Priority(QueuePolicyConfig()), max_in_flight=max_in_flight)
        rng = random.Random(7)  # noqa: S311 - no secrets here
        for index in range(24):
            prompt = (index,) * rng.choice((1, 2, 22))
            _submit_served(driver, _request(index, prompt=prompt, max_tokens=6, priority=rng.randrange(5)))
        admitted = _started_requests(driver)
        order = sorted(driver.accounts.values(), key=lambda a: (a.request.priority, a.request.request_id))
        right = [account.request.request_id for account in order]
        require(admitted == right, f"requests were admitted in the order {admitted}; the policy's is {right}")


def check_aborts(factory: SchedulerFactory) -> None:
    """An abort after any number of steps, of any request, ends it at once and harms no other."""
    for max_in_flight in OVERLAPS:
        for num_steps in range(24):
            config = _config(num_blocks=8, block_size_tokens=2, max_num_seqs=4, max_step_tokens=6, max_model_tokens=16)
            driver = SchedulerDriver(factory, config, max_in_flight=max_in_flight)
            for index in range(6):
                _submit_served(driver, _request(index, prompt=(index, 9, 9), max_tokens=8))
            for _ in range(num_steps):
                driver.step()
            for request_id in (num_steps % 6, (num_steps * 5 + 3) % 6, 1000):
                driver.abort(RequestId(request_id))
            driver.run()
            _check_serves_on(driver)


def check_failed_rows(factory: SchedulerFactory) -> None:
    """A row that fails ends its request with `internal` and the row's message, and no other request."""
    for max_in_flight in OVERLAPS:
        for num_steps in range(8):
            driver = SchedulerDriver(factory, _config(max_step_tokens=6), max_in_flight=max_in_flight)
            requests = [_request(index, prompt=(index, 9, 9, 9, 9), max_tokens=8) for index in range(4)]
            for request in requests:
                _submit_served(driver, request)
            for _ in range(num_steps):
                driver.step()
            driver.device.fail_next_row(RequestId(2))
            driver.run()
            terminal = driver.accounts[RequestId(2)].terminal
            require(
                isinstance(terminal, Failed) and terminal.kind is FailureKind.INTERNAL,
                f"a row of request 2 failed; it ended with {terminal}",
            )
            _check_served_in_full(driver, [request for request in requests if request.request_id != 2])


def check_cache_isolation(factory: SchedulerFactory) -> None:
    """Equal prompts under other salts, or with other adapters, never share KV; the fake device sees to that."""
    prompt = tuple(range(20))
    for max_in_flight in OVERLAPS:
        driver = SchedulerDriver(factory, _config(), max_in_flight=max_in_flight)
        names = [(None, None), ("", None), ("salt", None), (None, "adapter"), ("salt", "adapter"), (None, None)]
        requests = [
            _request(index, prompt=prompt, max_tokens=4, cache_salt=salt, lora=lora)
            for index, (salt, lora) in enumerate(names)
        ]
        for request in requests:
            _submit_served(driver, request)
            driver.run()
        _check_served_in_full(driver, requests)


def check_log_probabilities(factory: SchedulerFactory) -> None:
    """Each token's and each prompt token's log-probabilities arrive once and in order, preemptions or not."""
    for max_in_flight in OVERLAPS:
        config = _config(num_blocks=12, block_size_tokens=2, max_num_seqs=4, max_step_tokens=5, max_model_tokens=24)
        driver = SchedulerDriver(factory, config, max_in_flight=max_in_flight)
        requests = [
            _request(index, prompt=tuple(range(9)), max_tokens=max_tokens, logprobs=2, prompt_logprobs=1)
            for index, max_tokens in enumerate((12, 0, 12, 1, 12, 0, 12, 12))
        ]
        for request in requests:
            _submit_served(driver, request)
        driver.run()
        _check_served_in_full(driver, requests)


def check_grammars(factory: SchedulerFactory) -> None:
    """A request with a grammar is not planned ahead of its last token, and is served all the same."""
    for max_in_flight in OVERLAPS:
        config = _config(num_blocks=12, block_size_tokens=2, max_num_seqs=4, max_step_tokens=5, max_model_tokens=24)
        driver = SchedulerDriver(factory, config, max_in_flight=max_in_flight)
        requests = [
            _request(index, prompt=tuple(range(5)), max_tokens=12, grammar=_GRAMMAR if index % 2 else None)
            for index in range(8)
        ]
        for request in requests:
            _submit_served(driver, request)
        driver.run()
        _check_served_in_full(driver, requests)


def check_seeds(factory: SchedulerFactory) -> None:
    """A request without a seed is given one of its own."""
    driver = SchedulerDriver(factory, _config())
    for index in range(8):
        _submit_served(driver, _request(index, prompt=(1, 2, 3), max_tokens=2, seed=42 if index == 0 else None))
    driver.run()
    seeds = list(driver.device.seeds.values())
    require(len(set(seeds)) == len(seeds), f"two of eight requests have the same seed: {seeds}")


def check_faulty_policy(factory: SchedulerFactory) -> None:
    """A queue policy that raises costs the request that it was asked about, and no other."""
    for max_in_flight in OVERLAPS:
        driver = SchedulerDriver(factory, _config(), policy=_FaultyPolicy(), max_in_flight=max_in_flight)
        for index in range(12):
            if index in _FaultyPolicy.FAULTS:
                driver.may_fail.add(RequestId(index))
            driver.submit(_request(index, prompt=(index, 3), max_tokens=3))
        driver.abort(RequestId(8))  # whose withdrawal raises
        driver.run()
        for index in _FaultyPolicy.FAULTS:
            terminal = driver.accounts[RequestId(index)].terminal
            is_failure = isinstance(terminal, Failed) and terminal.kind is FailureKind.INTERNAL
            require(is_failure, f"the policy raised on request {index}; it ended with {terminal}")
        others = set(range(12)) - set(_FaultyPolicy.FAULTS) - {8}
        _check_served_in_full(driver, [driver.accounts[RequestId(index)].request for index in sorted(others)])


# The narrow ones first.
SCHEDULER_CHECKS: tuple[SchedulerCheck, ...] = (
    check_refusals,
    check_context_length,
    check_full_queue,
    check_queue_order,
    check_failed_rows,
    check_cache_isolation,
    check_seeds,
    check_log_probabilities,
    check_grammars,
    check_aborts,
    check_pressure,
    check_faulty_policy,
    check_random_traffic,
)


# --- traffic --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Unordered:
    def __lt__(self, other: object) -> bool:
        raise TypeError("these keys have no order")


class _FaultyPolicy:
    """First come first served, until it is asked about one of `FAULTS`."""

    FAULTS = (2, 5, 6)

    def key(self, request: GenerateRequest, arrival: int) -> Any:
        if request.request_id == 2:
            raise ValueError("key of request 2")
        return _Unordered() if request.request_id == 5 else arrival

    def admitted(self, request: GenerateRequest) -> None:
        if request.request_id == 6:
            raise ValueError("admission of request 6")

    def withdrawn(self, request: GenerateRequest) -> None:
        if request.request_id == 8:
            raise ValueError("withdrawal of request 8")


def _config(
    *,
    num_blocks: int = 64,
    block_size_tokens: int = 4,
    max_num_seqs: int = 4,
    max_step_tokens: int = 16,
    max_model_tokens: int = 64,
    max_waiting: int = 64,
) -> SchedulerConfig:
    return SchedulerConfig(
        num_blocks=num_blocks,
        block_size_tokens=block_size_tokens,
        max_num_seqs=max_num_seqs,
        max_step_tokens=max_step_tokens,
        max_model_tokens=max_model_tokens,
        max_waiting=max_waiting,
    )


def _request(
    request_id: int,
    *,
    prompt: tuple[int, ...],
    max_tokens: int,
    priority: int = 0,
    cache_salt: str | None = None,
    lora: str | None = None,
    seed: int | None = None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    grammar: Grammar | None = None,
) -> GenerateRequest:
    return GenerateRequest(
        request_id=RequestId(request_id),
        prompt_token_ids=prompt,
        sampling=SamplingParams(
            max_tokens=max_tokens, seed=seed, logprobs=logprobs, prompt_logprobs=prompt_logprobs, grammar=grammar
        ),
        priority=priority,
        cache_salt=cache_salt,
        lora=lora,
    )


def _random_config(rng: random.Random) -> SchedulerConfig:
    block_size_tokens = rng.choice((1, 2, 4, 16))
    max_model_tokens = rng.choice((24, 40, 64))
    max_num_seqs = rng.choice((1, 2, 5, 8))
    blocks_of_one = -(-max_model_tokens // block_size_tokens)
    return SchedulerConfig(
        num_blocks=rng.choice((blocks_of_one, blocks_of_one + 3, 3 * blocks_of_one, 12 * blocks_of_one)),
        block_size_tokens=block_size_tokens,
        max_num_seqs=max_num_seqs,
        max_step_tokens=rng.choice((max_num_seqs, max_num_seqs + 3, 4 * max_num_seqs + 16)),
        max_model_tokens=max_model_tokens,
        prefix_cache=rng.random() < 0.8,
    )


def _drive_at_random(driver: SchedulerDriver, rng: random.Random) -> None:
    for request_id in range(rng.choice((10, 40))):
        request = _random_request(request_id, driver.config.max_model_tokens, rng)
        _submit_served(driver, request)
        for _ in range(rng.choice((0, 0, 1, 4))):
            driver.step()
        if rng.random() < 0.15:
            driver.abort(RequestId(rng.randrange(request_id + 1)))
        if rng.random() < 0.05:
            driver.device.fail_next_row(request.request_id)
    driver.run()


def _random_request(request_id: int, max_model_tokens: int, rng: random.Random) -> GenerateRequest:
    shared = rng.choice(((), tuple(range(12)), tuple(range(18)), (7,) * 16))
    own = tuple(rng.choices(range(fake_model.NUM_TOKEN_IDS), k=rng.choice((1, 2, 3, 9))))
    prompt = (shared + own)[: max_model_tokens - 1]
    max_tokens = rng.choice((1, 2, 6, 20, 100))
    prompt_logprobs = rng.choice((None, None, None, 0, 2))
    return GenerateRequest(
        request_id=RequestId(request_id),
        prompt_token_ids=prompt,
        sampling=SamplingParams(
            max_tokens=0 if prompt_logprobs == 2 and rng.random() < 0.5 else max_tokens,
            stop_token_ids=tuple(rng.sample(range(fake_model.NUM_TOKEN_IDS), k=rng.choice((0, 0, 2, 8)))),
            min_tokens=rng.choice((0, 0, 3)) if max_tokens > 3 and prompt_logprobs != 2 else 0,
            logprobs=rng.choice((None, 1)),
            prompt_logprobs=prompt_logprobs,
            seed=rng.choice((None, rng.getrandbits(64))),
            grammar=rng.choice((None, None, _GRAMMAR)),
        ),
        cache_salt=rng.choice((None, None, "a", "b")),
        lora=rng.choice((None, None, None, "adapter")),
        tenant=rng.choice(("", "gold", "free")),
        priority=rng.choice((0, 0, 0, -1, 1)),
    )


def _submit_served(driver: SchedulerDriver, request: GenerateRequest) -> None:
    terminal = driver.submit(request)
    require(terminal is None, f"request {request.request_id} can be served; add answered {terminal}")


def _started_requests(driver: SchedulerDriver) -> list[RequestId]:
    started: dict[RequestId, None] = {}
    while driver.scheduler.unfinished:
        plan: StepPlan | None = driver.step()
        started.update((start.request.request_id, None) for start in (plan.started if plan else ()))
    driver.run()
    return list(started)


def _check_served_in_full(driver: SchedulerDriver, requests: Iterable[GenerateRequest]) -> None:
    for request in requests:
        account = driver.accounts[request.request_id]
        require(isinstance(account.scheduled, Scheduled), f"{account.what} has no Scheduled event")
        require(
            tuple(account.token_ids) == driver.outcome(request).token_ids,
            f"{account.what} got {account.token_ids}, {account.terminal}; the model gives {driver.outcome(request)}",
        )


def _check_serves_on(driver: SchedulerDriver) -> None:
    # As long as the context, with everything to itself: blocks and slots that leaked before are missed here.
    request_id = max(driver.accounts) + 1
    prompt = (request_id % fake_model.NUM_TOKEN_IDS,) * (driver.config.max_model_tokens // 2)
    request = _request(request_id, prompt=prompt, max_tokens=driver.config.max_model_tokens)
    _submit_served(driver, request)
    driver.run()
    _check_served_in_full(driver, [request])
