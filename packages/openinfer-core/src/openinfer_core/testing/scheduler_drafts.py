"""Conformance of a `Scheduler` where rows have drafts: `SchedulerConfig.max_drafts` is above 0.

Each check runs with drafters that are always right, always wrong, mixed and hostile (`fake_drafter.py`), with and
without overlap, on a device that runs a step early or late. Whatever the drafts are, a request has the tokens that it
has without them. A scheduler that plans no drafts passes, too.
"""

import random
from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

import msgspec

from openinfer_core.events import Failed, FailureKind
from openinfer_core.queue_policies import FairShare, FirstComeFirstServed, Priority
from openinfer_core.request import GenerateRequest, RequestId
from openinfer_core.scheduling import QueuePolicy, QueuePolicyConfig, SchedulerConfig
from openinfer_core.testing import fake_model
from openinfer_core.testing.errors import require
from openinfer_core.testing.fake_drafter import DraftScript
from openinfer_core.testing.scheduler_driver import RunsAt, SchedulerDriver, SchedulerFactory
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

_DraftCheck: TypeAlias = Callable[[SchedulerFactory], None]
_POLICIES: tuple[Callable[[QueuePolicyConfig], QueuePolicy], ...] = (FirstComeFirstServed, Priority, FairShare)
_NUM_CASES = 12  # drafters, each without overlap, and with it on a device that runs steps early or late


def check_drafts_in_random_traffic(factory: SchedulerFactory, *, seeds: Iterable[int] = range(12)) -> None:
    """Arrivals, aborts and failing rows at random, over random limits, policies and drafters."""
    for seed in seeds:
        rng = random.Random(seed)  # noqa: S311 - no secrets here
        config = msgspec.structs.replace(random_config(rng), max_drafts=rng.choice((1, 2, 3, 5)))
        policy = rng.choice(_POLICIES)(QueuePolicyConfig(tenant_weights={"gold": 4.0}))
        driver = _make_driver(factory, config, seed, policy=policy)
        drive_at_random(driver, rng)
        check_serves_on(driver)


def check_drafts_with_states(factory: SchedulerFactory, *, seeds: Iterable[int] = range(_NUM_CASES)) -> None:
    """The same for a model with recurrent states, which cannot be set back to before a rejected draft."""
    for seed in seeds:
        rng = random.Random(seed)  # noqa: S311 - no secrets here
        config = msgspec.structs.replace(
            random_config(rng), max_drafts=rng.choice((1, 3)), prefix_cache=False, num_snapshots=rng.choice((1, 4))
        )
        driver = _make_driver(factory, config, seed)
        drive_at_random(driver, rng)
        check_serves_on(driver)


def check_drafts_under_pressure(factory: SchedulerFactory) -> None:
    """Sequences that outgrow the pool many times over are served: drafts refuse no request and wedge none."""
    for num_blocks in (10, 13):
        config = make_config(
            num_blocks=num_blocks, block_size_tokens=2, max_num_seqs=6, max_step_tokens=12, max_model_tokens=20
        )
        for driver in _drivers(factory, config, max_drafts=4):
            requests = [make_request(index, prompt=(index, 1, 2), max_tokens=15) for index in range(8)]
            _serve(driver, requests)
            check_serves_on(driver)


def check_drafts_at_ends(factory: SchedulerFactory) -> None:
    """Stop tokens, `min_tokens`, `max_tokens` and the end of the context fall on every place of a span."""
    config = make_config(max_num_seqs=6, max_step_tokens=32, max_model_tokens=20, num_blocks=96)
    for driver in _drivers(factory, config, max_drafts=4):
        _serve(driver, list(_requests_with_ends(config.max_model_tokens)))


def check_drafts_with_log_probabilities(factory: SchedulerFactory) -> None:
    """Each token's and each prompt token's log-probabilities arrive once and in order, over chunks and preemptions."""
    config = make_config(num_blocks=12, block_size_tokens=2, max_num_seqs=4, max_step_tokens=7, max_model_tokens=24)
    for driver in _drivers(factory, config, max_drafts=3):
        requests = [
            make_request(index, prompt=tuple(range(9)), max_tokens=max_tokens, logprobs=2, prompt_logprobs=1)
            for index, max_tokens in enumerate((12, 0, 1, 12, 0, 12))
        ]
        _serve(driver, requests)


def check_drafts_with_grammars(factory: SchedulerFactory) -> None:
    """A request with a grammar has drafts on the host alone, and is not planned ahead of its last token."""
    config = make_config(num_blocks=14, block_size_tokens=2, max_num_seqs=4, max_step_tokens=9, max_model_tokens=24)
    for driver in _drivers(factory, config, max_drafts=3):
        requests = [
            make_request(index, prompt=tuple(range(5)), max_tokens=12, grammar=GRAMMAR if index % 2 else None)
            for index in range(6)
        ]
        _serve(driver, requests)


def check_drafts_and_aborts(factory: SchedulerFactory) -> None:
    """An abort after any number of steps, with drafts in flight, ends its request and harms no other."""
    config = make_config(num_blocks=10, block_size_tokens=2, max_num_seqs=4, max_step_tokens=12, max_model_tokens=16)
    for num_steps in range(_NUM_CASES):
        driver = _make_driver(factory, msgspec.structs.replace(config, max_drafts=3), num_steps)
        for index in range(6):
            submit_served(driver, make_request(index, prompt=(index, 9, 9), max_tokens=8))
        for _ in range(num_steps):
            driver.step()
        for request_id in (num_steps % 6, (num_steps * 5 + 3) % 6):
            driver.abort(RequestId(request_id))
        driver.run()
        check_serves_on(driver)


def check_drafts_and_failed_rows(factory: SchedulerFactory) -> None:
    """A row with drafts that fails ends its request, and no other."""
    for num_steps in range(_NUM_CASES):
        config = make_config(max_step_tokens=16)
        driver = _make_driver(factory, msgspec.structs.replace(config, max_drafts=2), num_steps)
        requests = [make_request(index, prompt=(index, 9, 9, 9, 9), max_tokens=40) for index in range(4)]
        for request in requests:
            submit_served(driver, request)
        for _ in range(num_steps % 8):
            driver.step()
        driver.device.fail_next_row(RequestId(2))
        driver.run()
        terminal = driver.accounts[RequestId(2)].terminal
        is_failure = isinstance(terminal, Failed) and terminal.kind is FailureKind.INTERNAL
        require(is_failure, f"a row of request 2 failed; it ended with {terminal}")
        check_served_in_full(driver, [request for request in requests if request.request_id != 2])


def check_drafts_in_conversations(factory: SchedulerFactory) -> None:
    """Prompts that repeat what was generated before find no KV of a draft that was rejected."""
    for block_size_tokens in (1, 2, 4):
        config = make_config(
            num_blocks=192 // block_size_tokens,
            block_size_tokens=block_size_tokens,
            max_step_tokens=24,
            max_model_tokens=64,
        )
        for driver in _drivers(factory, config, max_drafts=4):
            _converse(driver, num_conversations=6, num_turns=5)


DRAFT_CHECKS: tuple[_DraftCheck, ...] = (
    check_drafts_at_ends,
    check_drafts_and_failed_rows,
    check_drafts_with_log_probabilities,
    check_drafts_with_grammars,
    check_drafts_in_conversations,
    check_drafts_and_aborts,
    check_drafts_under_pressure,
    check_drafts_with_states,
    check_drafts_in_random_traffic,
)


def _drivers(factory: SchedulerFactory, config: SchedulerConfig, *, max_drafts: int) -> Iterator[SchedulerDriver]:
    with_drafts = msgspec.structs.replace(config, max_drafts=max_drafts)
    for case in range(_NUM_CASES):
        yield _make_driver(factory, with_drafts, case)


def _make_driver(
    factory: SchedulerFactory, config: SchedulerConfig, case: int, *, policy: QueuePolicy | None = None
) -> SchedulerDriver:
    scripts = list(DraftScript)
    max_in_flight, runs_at = ((1, RunsAt.PLAN), (2, RunsAt.PLAN), (2, RunsAt.APPLY))[case // len(scripts) % 3]
    return SchedulerDriver(
        factory,
        config,
        policy=policy,
        max_in_flight=max_in_flight,
        runs_at=runs_at,
        drafts=scripts[case % len(scripts)],
    )


def _serve(driver: SchedulerDriver, requests: list[GenerateRequest]) -> None:
    for request in requests:
        submit_served(driver, request)
    driver.run()
    check_served_in_full(driver, requests)


def _requests_with_ends(max_model_tokens: int) -> Iterator[GenerateRequest]:
    request_id = 0
    for place in range(8):
        prompt = (place, 3)
        whole = fake_model.outcome(
            make_request(request_id, prompt=prompt, max_tokens=12), max_model_tokens=max_model_tokens
        )
        stop = (whole.token_ids[place],)
        for min_tokens in (0, place, place + 1):
            yield make_request(request_id, prompt=prompt, max_tokens=12, stop_token_ids=stop, min_tokens=min_tokens)
            request_id += 1
        yield make_request(request_id, prompt=prompt, max_tokens=place + 1)
        yield make_request(request_id + 1, prompt=(place,) * (max_model_tokens - 1 - place), max_tokens=50)
        request_id += 2


def _converse(driver: SchedulerDriver, *, num_conversations: int, num_turns: int) -> None:
    """Each turn is asked when the one before has ended, whatever is in flight then; some are cut short."""
    open_turns = {(index, 0): _ask(driver, (index, index, 1), index) for index in range(num_conversations)}
    requests, aborted = list(open_turns.values()), set[RequestId]()
    while open_turns:
        driver.step()
        for (index, turn), asked in list(open_turns.items()):
            account = driver.accounts[asked.request_id]
            if account.terminal is None and index % 2 and len(account.token_ids) > turn + 1:
                aborted.add(asked.request_id)
                driver.abort(asked.request_id)
            if account.terminal is None:
                continue
            del open_turns[index, turn]
            if turn + 1 < num_turns:
                token_ids = (*asked.prompt_token_ids, *account.token_ids, index)
                requests.append(_ask(driver, token_ids, len(requests)))
                open_turns[index, turn + 1] = requests[-1]
    driver.run()
    check_served_in_full(driver, [request for request in requests if request.request_id not in aborted])


def _ask(driver: SchedulerDriver, prompt: tuple[int, ...], request_id: int) -> GenerateRequest:
    request = make_request(request_id, prompt=prompt, max_tokens=5 + request_id % 5)
    submit_served(driver, request)
    return request
