"""Conformance of a `Scheduler`: `check_scheduler(factory)` runs every check; `SCHEDULER_CHECKS` lists them.

    @pytest.mark.parametrize("check", SCHEDULER_CHECKS, ids=attrgetter("__name__"))
    def test_my_scheduler_conforms(check):
        check(MyScheduler)

Each check drives schedulers on a `FakeDevice`, with and without overlap of steps. The traffic is random and the same
in every run. What is checked throughout is listed in `SchedulerDriver` and `FakeDevice`: limits, positions, KV
contents, slots, seeds, events, the queue policy's hooks, no wedge, nothing left over at the end.

What does not apply to a scheduler is left out because of what it declares (`SchedulerCapabilities`), and for no other
reason: the order of admissions with `own_order` or `own_policy`, faults of a policy that is never asked with
`own_policy`, requests that end before they ran with `may_shed`, several block tables without `frees_windows`. Rows are
held by one that is a `HoldsRows`.
"""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import msgspec

from openinfer_core.errors import InvalidRequest, Refused
from openinfer_core.events import Failed, FailureKind
from openinfer_core.queue_policies import FairShare, FirstComeFirstServed, Priority
from openinfer_core.request import GenerateRequest, LoadedAdapter, RequestId
from openinfer_core.scheduling import (
    PlacesAdapters,
    QueuePolicy,
    QueuePolicyConfig,
    SchedulerCapabilities,
    StepPlan,
    WaitingRequest,
)
from openinfer_core.testing.errors import ConformanceError, require
from openinfer_core.testing.scheduler_drafts import DRAFT_CHECKS
from openinfer_core.testing.scheduler_driver import SchedulerDriver, SchedulerFactory
from openinfer_core.testing.scheduler_holds import HOLD_CHECKS
from openinfer_core.testing.scheduler_tables import TABLE_CHECKS
from openinfer_core.testing.scheduler_traffic import (
    GRAMMAR,
    check_served_in_full,
    check_serves_on,
    drive_at_random,
    make_config,
    make_request,
    random_config,
    submit_served,
)
from openinfer_core.testing.scheduler_victims import check_chosen_victims, check_faulty_victims

SchedulerCheck: TypeAlias = Callable[[SchedulerFactory], None]

OVERLAPS = (1, 2)  # steps in flight: without overlap and with it

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
            driver = SchedulerDriver(factory, random_config(rng), policy=policy, max_in_flight=max_in_flight)
            drive_at_random(driver, rng)
            check_serves_on(driver)


def check_unknown_options(factory: SchedulerFactory) -> None:
    """An option that the scheduler does not know is refused when it is made, and none is taken in silence."""
    config = msgspec.structs.replace(make_config(), options={"no-option-of-any-scheduler": "1"})
    try:
        SchedulerDriver(factory, config)
    except (Refused, InvalidRequest):
        return
    raise ConformanceError("the scheduler was made with an option that it cannot know; it must raise Refused")


def check_pressure(factory: SchedulerFactory) -> None:
    """Sequences that together outgrow the pool many times over: all are served, and a request afterwards too."""
    for max_in_flight in OVERLAPS:
        config = make_config(num_blocks=10, block_size_tokens=2, max_num_seqs=6, max_step_tokens=8, max_model_tokens=20)
        driver = SchedulerDriver(factory, config, max_in_flight=max_in_flight)
        requests = [make_request(index, prompt=(index, 1, 2), max_tokens=15) for index in range(12)]
        for request in requests:
            submit_served(driver, request)
        driver.run()
        check_served_in_full(driver, requests)
        check_serves_on(driver)


def check_refusals(factory: SchedulerFactory) -> None:
    """What can never be served is refused by `add`, with a message, and harms no other request."""
    for max_in_flight in OVERLAPS:
        config = make_config(num_blocks=8, block_size_tokens=4, max_model_tokens=64)
        driver = SchedulerDriver(factory, config, max_in_flight=max_in_flight)
        too_long = make_request(0, prompt=(1,) * 65, max_tokens=1)
        too_big_for_pool = make_request(1, prompt=(1,) * 40, max_tokens=8)
        grows_too_big = make_request(2, prompt=(1,) * 8, max_tokens=40)
        fits = make_request(3, prompt=(1,) * 8, max_tokens=8)
        submit_served(driver, fits)
        for request in (too_long, too_big_for_pool, grows_too_big):
            terminal = driver.submit(request)
            is_refusal = isinstance(terminal, Failed) and terminal.kind is FailureKind.INVALID and terminal.message
            require(is_refusal, f"request {request.request_id} can never fit; add answered {terminal}")
        driver.run()
        check_served_in_full(driver, [fits])


def check_context_length(factory: SchedulerFactory) -> None:
    """A request that asks for more than the context holds ends with `length` at its bound."""
    for max_in_flight in OVERLAPS:
        driver = SchedulerDriver(factory, make_config(max_model_tokens=24), max_in_flight=max_in_flight)
        requests = [make_request(index, prompt=(index,) * (20 + index), max_tokens=50) for index in range(4)]
        for request in requests:
            submit_served(driver, request)
        driver.run()
        check_served_in_full(driver, requests)


def check_full_queue(factory: SchedulerFactory) -> None:
    """Beyond `max_waiting`, `add` answers `overloaded`; what was taken is served, and there is room again later."""
    driver = SchedulerDriver(factory, make_config(max_waiting=3))
    terminals = [driver.submit(make_request(index, prompt=(index, 5), max_tokens=4)) for index in range(6)]
    require(terminals[:3] == [None] * 3, f"max_waiting is 3; add answered {terminals[:3]} to the first three requests")
    for terminal in terminals[3:]:
        is_overload = isinstance(terminal, Failed) and terminal.kind is FailureKind.OVERLOADED
        require(is_overload, f"the queue is full; add answered {terminal}")
    driver.run()
    check_serves_on(driver)


def check_queue_order(factory: SchedulerFactory) -> None:
    """Requests are admitted in the order of the policy's keys, also where only one after the head would fit.

    Where the scheduler declares an order of its own, all are served in whichever it has.
    """
    for max_in_flight in OVERLAPS:
        config = make_config(num_blocks=16, block_size_tokens=2, max_num_seqs=4, max_step_tokens=8, max_model_tokens=32)
        driver = SchedulerDriver(factory, config, policy=Priority(QueuePolicyConfig()), max_in_flight=max_in_flight)
        rng = random.Random(7)  # noqa: S311 - no secrets here
        for index in range(24):
            prompt = (index,) * rng.choice((1, 2, 22))
            submit_served(driver, make_request(index, prompt=prompt, max_tokens=6, priority=rng.randrange(5)))
        admitted = _started_requests(driver)
        if not driver.scheduler.capabilities.keeps_policy_order:
            check_served_in_full(driver, [account.request for account in driver.accounts.values()])
            continue
        order = sorted(driver.accounts.values(), key=lambda a: (a.request.priority, a.request.request_id))
        right = [account.request.request_id for account in order]
        require(admitted == right, f"requests were admitted in the order {admitted}; the policy's is {right}")


def check_aborts(factory: SchedulerFactory) -> None:
    """An abort after any number of steps, of any request, ends it at once and harms no other."""
    for max_in_flight in OVERLAPS:
        for num_steps in range(24):
            config = make_config(
                num_blocks=8, block_size_tokens=2, max_num_seqs=4, max_step_tokens=6, max_model_tokens=16
            )
            driver = SchedulerDriver(factory, config, max_in_flight=max_in_flight)
            for index in range(6):
                submit_served(driver, make_request(index, prompt=(index, 9, 9), max_tokens=8))
            for _ in range(num_steps):
                driver.step()
            for request_id in (num_steps % 6, (num_steps * 5 + 3) % 6, 1000):
                driver.abort(RequestId(request_id))
            driver.run()
            check_serves_on(driver)


def check_failed_rows(factory: SchedulerFactory) -> None:
    """A row that fails ends its request with `internal` and the row's message, and no other request."""
    for max_in_flight in OVERLAPS:
        for num_steps in range(8):
            driver = SchedulerDriver(factory, make_config(max_step_tokens=6), max_in_flight=max_in_flight)
            requests = [make_request(index, prompt=(index, 9, 9, 9, 9), max_tokens=8) for index in range(4)]
            for request in requests:
                submit_served(driver, request)
            for _ in range(num_steps):
                driver.step()
            driver.device.fail_next_row(RequestId(2))
            driver.run()
            terminal = driver.accounts[RequestId(2)].terminal
            require(
                isinstance(terminal, Failed) and terminal.kind is FailureKind.INTERNAL,
                f"a row of request 2 failed; it ended with {terminal}",
            )
            check_served_in_full(driver, [request for request in requests if request.request_id != 2])


def check_cache_isolation(factory: SchedulerFactory) -> None:
    """Equal prompts under other salts, or with other adapters, never share KV; the fake device sees to that."""
    prompt = tuple(range(20))
    for max_in_flight in OVERLAPS:
        driver = SchedulerDriver(factory, make_config(), max_in_flight=max_in_flight)
        names = [(None, None), ("", None), ("salt", None), (None, "adapter"), ("salt", "adapter"), (None, None)]
        requests = [
            make_request(index, prompt=prompt, max_tokens=4, cache_salt=salt, lora=lora)
            for index, (salt, lora) in enumerate(names)
        ]
        for request in requests:
            submit_served(driver, request)
            driver.run()
        check_served_in_full(driver, requests)


class _EveryAdapter:
    """An `AdapterPort` of ranks that hold whatever they are asked for."""

    def is_held(self, digest: bytes) -> bool:
        del digest
        return True

    def hold(self, digest: bytes) -> None:
        """It is held."""

    def pin(self, digest: bytes) -> None:
        """It stays."""

    def unpin(self, digest: bytes) -> None:
        """It stays."""

    def release(self, digest: bytes) -> None:
        """It stays."""


def check_adapter_identity(factory: SchedulerFactory) -> None:
    """KV belongs to an adapter's content: what is loaded under its name later shares none of it."""
    prompt = tuple(range(20))
    for max_in_flight in OVERLAPS:
        config = msgspec.structs.replace(make_config(), max_adapters=2)
        driver = SchedulerDriver(factory, config, max_in_flight=max_in_flight)
        if driver.scheduler.capabilities.places_adapters:
            cast("PlacesAdapters", driver.scheduler).use_adapters(_EveryAdapter())
        contents = [b"first" * 4, b"first" * 4, b"other" * 4, b"first" * 4]
        requests = [
            make_request(index, prompt=prompt, max_tokens=4, lora="adapter", adapter=LoadedAdapter(content[:16]))
            for index, content in enumerate(contents)
        ]
        for request in requests:
            submit_served(driver, request)
            driver.run()
        check_served_in_full(driver, requests)


def check_unshared_prefixes(factory: SchedulerFactory) -> None:
    """Without `prefix_cache` no prefix is shared; with `num_snapshots` one may be where its states are copied, too.

    So it is for a model with recurrent states: the device's states notice a row that begins without them.
    """
    for max_in_flight in OVERLAPS:
        for num_snapshots in (0, 3):
            config = msgspec.structs.replace(make_config(), prefix_cache=False, num_snapshots=num_snapshots)
            driver = SchedulerDriver(factory, config, max_in_flight=max_in_flight)
            requests = [make_request(index, prompt=(*range(20), index), max_tokens=4) for index in range(4)]
            for request in requests:
                submit_served(driver, request)
                driver.run()
                scheduled = driver.accounts[request.request_id].scheduled
                cached = 0 if scheduled is None or num_snapshots else scheduled.cached_tokens
                require(not cached, f"request {request.request_id} has {cached} cached tokens; prefix_cache is off")
            check_served_in_full(driver, requests)


def check_log_probabilities(factory: SchedulerFactory) -> None:
    """Each token's and each prompt token's log-probabilities arrive once and in order, preemptions or not."""
    for max_in_flight in OVERLAPS:
        config = make_config(num_blocks=12, block_size_tokens=2, max_num_seqs=4, max_step_tokens=5, max_model_tokens=24)
        driver = SchedulerDriver(factory, config, max_in_flight=max_in_flight)
        requests = [
            make_request(index, prompt=tuple(range(9)), max_tokens=max_tokens, logprobs=2, prompt_logprobs=1)
            for index, max_tokens in enumerate((12, 0, 12, 1, 12, 0, 12, 12))
        ]
        for request in requests:
            submit_served(driver, request)
        driver.run()
        check_served_in_full(driver, requests)


def check_grammars(factory: SchedulerFactory) -> None:
    """A request with a grammar is not planned ahead of its last token, and is served all the same."""
    for max_in_flight in OVERLAPS:
        config = make_config(num_blocks=12, block_size_tokens=2, max_num_seqs=4, max_step_tokens=5, max_model_tokens=24)
        driver = SchedulerDriver(factory, config, max_in_flight=max_in_flight)
        requests = [
            make_request(index, prompt=tuple(range(5)), max_tokens=12, grammar=GRAMMAR if index % 2 else None)
            for index in range(8)
        ]
        for request in requests:
            submit_served(driver, request)
        driver.run()
        check_served_in_full(driver, requests)


def check_seeds(factory: SchedulerFactory) -> None:
    """A request without a seed is given one of its own."""
    driver = SchedulerDriver(factory, make_config())
    for index in range(8):
        submit_served(driver, make_request(index, prompt=(1, 2, 3), max_tokens=2, seed=42 if index == 0 else None))
    driver.run()
    seeds = list(driver.device.seeds.values())
    require(len(set(seeds)) == len(seeds), f"two of eight requests have the same seed: {seeds}")


def check_capabilities(factory: SchedulerFactory) -> None:
    """What it declares is a `SchedulerCapabilities`, the same in every instance; an ignored policy hears nothing."""
    configs = (make_config(), make_config(max_waiting=1))
    declared = [SchedulerDriver(factory, config).scheduler.capabilities for config in configs]
    for capabilities in declared:
        require(type(capabilities) is SchedulerCapabilities, f"capabilities is {capabilities!r}")
    require(declared[0] == declared[1], f"two instances declare {declared[0]} and {declared[1]}")
    if declared[0].own_policy:
        driver = SchedulerDriver(factory, make_config(), policy=_UnaskedPolicy())
        driver.submit(make_request(0, prompt=(1, 2), max_tokens=3))
        driver.run()


def check_faulty_policy(factory: SchedulerFactory) -> None:
    """A queue policy that raises costs the request that it was asked about, and no other."""
    for max_in_flight in OVERLAPS:
        driver = SchedulerDriver(factory, make_config(), policy=_FaultyPolicy(), max_in_flight=max_in_flight)
        if driver.scheduler.capabilities.own_policy:
            return
        for index in range(12):
            if index in _FaultyPolicy.FAULTS:
                driver.may_fail.add(RequestId(index))
            driver.submit(make_request(index, prompt=(index, 3), max_tokens=3))
        driver.abort(RequestId(8))  # whose withdrawal raises
        driver.run()
        for index in _FaultyPolicy.FAULTS:
            terminal = driver.accounts[RequestId(index)].terminal
            is_failure = isinstance(terminal, Failed) and terminal.kind is FailureKind.INTERNAL
            require(is_failure, f"the policy raised on request {index}; it ended with {terminal}")
        others = set(range(12)) - set(_FaultyPolicy.FAULTS) - {8}
        check_served_in_full(driver, [driver.accounts[RequestId(index)].request for index in sorted(others)])


# The narrow ones first.
SCHEDULER_CHECKS: tuple[SchedulerCheck, ...] = (
    check_capabilities,
    check_refusals,
    check_unknown_options,
    check_context_length,
    check_full_queue,
    check_queue_order,
    check_failed_rows,
    check_cache_isolation,
    check_adapter_identity,
    check_unshared_prefixes,
    check_seeds,
    check_log_probabilities,
    check_grammars,
    check_aborts,
    check_pressure,
    check_faulty_policy,
    check_chosen_victims,
    check_faulty_victims,
    *TABLE_CHECKS,
    *DRAFT_CHECKS,
    *HOLD_CHECKS,
    check_random_traffic,
)


# --- traffic --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Unordered:
    def __lt__(self, other: object) -> bool:
        raise TypeError("these keys have no order")


class _UnaskedPolicy:
    """Of a scheduler that declares `own_policy`."""

    def key(self, waiting: WaitingRequest) -> Any:
        raise ConformanceError(
            f"own_policy is declared; the queue policy is asked about request {waiting.request.request_id}"
        )

    def admitted(self, request: GenerateRequest) -> None:
        raise ConformanceError(f"own_policy is declared; the queue policy is told of request {request.request_id}")

    def withdrawn(self, request: GenerateRequest) -> None:
        self.admitted(request)


class _FaultyPolicy:
    """First come first served, until it is asked about one of `FAULTS`."""

    FAULTS = (2, 5, 6)

    def key(self, waiting: WaitingRequest) -> Any:
        if waiting.request.request_id == 2:
            raise ValueError("key of request 2")
        return _Unordered() if waiting.request.request_id == 5 else waiting.arrival

    def admitted(self, request: GenerateRequest) -> None:
        if request.request_id == 6:
            raise ValueError("admission of request 6")

    def withdrawn(self, request: GenerateRequest) -> None:
        if request.request_id == 8:
            raise ValueError("withdrawal of request 8")


def _started_requests(driver: SchedulerDriver) -> list[RequestId]:
    started: dict[RequestId, None] = {}
    while driver.scheduler.unfinished_ids:
        plan: StepPlan | None = driver.step()
        started.update((start.request.request_id, None) for start in (plan.started if plan else ()))
    driver.run()
    return list(started)
