"""Conformance of a `Scheduler` that keeps several block tables: `SchedulerConfig.table_windows` has windows.

One that does not declare `frees_windows` is never given them, and is asked nothing here. The fake device reads of a
table with a window what the window shows, and notices a block that was given back too early or put into another table.
A pool of `SchedulerConfig.blocks_for_context` blocks has to do for a context of that length.
"""

import random
from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

import msgspec

from openinfer_core.events import Failed, FailureKind
from openinfer_core.request import GenerateRequest
from openinfer_core.scheduling import SchedulerConfig
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

_TableCheck: TypeAlias = Callable[[SchedulerFactory], None]
_OVERLAPS = ((1, RunsAt.PLAN), (2, RunsAt.PLAN), (2, RunsAt.APPLY))
_WINDOWS: tuple[tuple[int | None, ...], ...] = ((None, 4), (5,), (None, 3, 9, None), (6, 6), (None, 1, 16))


def check_tables_in_random_traffic(factory: SchedulerFactory, *, seeds: Iterable[int] = range(15)) -> None:
    """Arrivals, aborts and failing rows at random, over random limits and windows, with drafts and without."""
    if not _frees_windows(factory):
        return
    for seed in seeds:
        rng = random.Random(seed)  # noqa: S311 - no secrets here
        config = random_config(rng, table_windows=_WINDOWS[seed % len(_WINDOWS)])
        if seed % 2:
            config = msgspec.structs.replace(config, max_drafts=rng.choice((1, 2, 5)))
        driver = _make_driver(factory, config, seed)
        drive_at_random(driver, rng)
        check_serves_on(driver)


def check_tables_under_pressure(factory: SchedulerFactory) -> None:
    """Sequences that together outgrow the pool many times over, in a pool that has just room for one of them."""
    for config in _configs(factory, max_num_seqs=6, max_step_tokens=8, max_model_tokens=20):
        for case, more_blocks in enumerate((0, 3, 0)):
            num_blocks = config.blocks_for_context(config.max_model_tokens) + more_blocks
            driver = _make_driver(factory, msgspec.structs.replace(config, num_blocks=num_blocks), case)
            requests = [
                make_request(
                    index,
                    prompt=(index, 1, 2, *range(index)),
                    max_tokens=15,
                    grammar=GRAMMAR if index % 4 == 3 else None,
                )
                for index in range(10)
            ]
            _serve(driver, requests)
            check_serves_on(driver)


def check_windows_are_given_back(factory: SchedulerFactory) -> None:
    """From its first token on, a sequence holds of a table with a window no more than what it will still read."""
    for config in _configs(factory, max_model_tokens=64, num_blocks=160):
        for case, prefix_cache in enumerate((True, False, True)):
            driver = _make_driver(factory, msgspec.structs.replace(config, prefix_cache=prefix_cache), case)
            request = make_request(0, prompt=tuple(range(30)), max_tokens=34)
            submit_served(driver, request)
            account = driver.accounts[request.request_id]
            while account.terminal is None:
                driver.step()
                if account.token_ids:
                    _check_blocks_used(driver, 30 + len(account.token_ids))
            driver.run()
            check_served_in_full(driver, [request])


def check_tables_in_conversations(factory: SchedulerFactory) -> None:
    """Prompts that go on from earlier ones, whose blocks behind the windows may be gone, share right KV alone."""
    for config in _configs(factory, max_model_tokens=64, max_step_tokens=24):
        for case, num_contexts in enumerate((1, 2, 8)):
            num_blocks = num_contexts * config.blocks_for_context(config.max_model_tokens)
            driver = _make_driver(factory, msgspec.structs.replace(config, num_blocks=num_blocks), case)
            requests: list[GenerateRequest] = []
            for turn in range(4):
                asked = [
                    make_request(
                        len(requests) + index,
                        prompt=(*range(9 + 11 * turn), index % 2),
                        max_tokens=7,
                        cache_salt="salt" if index == 3 else None,
                    )
                    for index in range(5)
                ]
                _serve(driver, asked)
                requests += asked
            check_served_in_full(driver, requests)


def check_refusals_with_tables(factory: SchedulerFactory) -> None:
    """A context that fits, if what lies behind the windows is given back, is served; one that never fits is refused."""
    for config in _configs(factory, max_model_tokens=64):
        fits = msgspec.structs.replace(config, num_blocks=config.blocks_for_context(64))
        for case in range(len(_OVERLAPS)):
            driver = _make_driver(factory, fits, case)
            _serve(driver, [make_request(0, prompt=(1,) * 48, max_tokens=16)])
        if None not in config.table_windows:
            continue
        too_few = msgspec.structs.replace(config, num_blocks=max(1, 48 // config.block_size_tokens))
        driver = _make_driver(factory, too_few, 0)
        terminal = driver.submit(make_request(0, prompt=(1,) * 60, max_tokens=4))
        is_refusal = isinstance(terminal, Failed) and terminal.kind is FailureKind.INVALID and terminal.message
        require(is_refusal, f"request 0 can never fit; add answered {terminal}")


TABLE_CHECKS: tuple[_TableCheck, ...] = (
    check_windows_are_given_back,
    check_refusals_with_tables,
    check_tables_in_conversations,
    check_tables_under_pressure,
    check_tables_in_random_traffic,
)


def check_tables(factory: SchedulerFactory) -> None:
    """Runs all of `TABLE_CHECKS`; `ConformanceError` if the scheduler does not conform."""
    for check in TABLE_CHECKS:
        check(factory)


def _frees_windows(factory: SchedulerFactory) -> bool:
    return SchedulerDriver(factory, make_config()).scheduler.capabilities.frees_windows


def _configs(
    factory: SchedulerFactory,
    *,
    max_model_tokens: int,
    num_blocks: int = 64,
    max_num_seqs: int = 4,
    max_step_tokens: int = 16,
) -> Iterator[SchedulerConfig]:
    if not _frees_windows(factory):
        return
    for windows in _WINDOWS:
        for block_size_tokens in (2, 4):
            yield make_config(
                num_blocks=num_blocks,
                block_size_tokens=block_size_tokens,
                max_num_seqs=max_num_seqs,
                max_step_tokens=max_step_tokens,
                max_model_tokens=max_model_tokens,
                table_windows=windows,
            )


def _make_driver(factory: SchedulerFactory, config: SchedulerConfig, case: int) -> SchedulerDriver:
    scripts = list(DraftScript)
    max_in_flight, runs_at = _OVERLAPS[case % len(_OVERLAPS)]
    return SchedulerDriver(
        factory, config, max_in_flight=max_in_flight, runs_at=runs_at, drafts=scripts[case // 2 % len(scripts)]
    )


def _serve(driver: SchedulerDriver, requests: list[GenerateRequest]) -> None:
    for request in requests:
        submit_served(driver, request)
    driver.run()
    check_served_in_full(driver, requests)


def _check_blocks_used(driver: SchedulerDriver, num_tokens: int) -> None:
    config, used = driver.config, driver.scheduler.stats().blocks_used
    size, limit = config.block_size_tokens, config.max_model_tokens
    # A scheduler may hold blocks for all tokens to come. Three more: where the window begins within a block, for the
    # last token, which is not computed yet, and for a scheduler that gives back when it plans.
    most = sum(
        -(-limit // size) if window is None else -(-(window + limit - num_tokens) // size) + 3
        for window in config.table_windows
    )
    require(
        used <= most,
        f"a request alone holds {used} blocks at token {num_tokens} of {limit}; with windows {config.table_windows} it "
        f"needs {most} at most: what lies behind a window is not given back",
    )
