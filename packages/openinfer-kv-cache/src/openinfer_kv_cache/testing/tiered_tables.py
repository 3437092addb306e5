"""Conformance of a scheduler that uses KV tiers and keeps several block tables, as `frees_windows` declares.

A prefix is of use where each table has what is seen after it, so that a load fills all tables or is worth nothing.
"""

import random
from collections.abc import Iterator

from openinfer_core.request import RequestId
from openinfer_core.scheduling import SchedulerConfig
from openinfer_core.testing.errors import require
from openinfer_core.testing.scheduler_driver import SchedulerDriver, SchedulerFactory
from openinfer_kv_cache.testing.fake_tier_port import NEVER, TieredDriver
from openinfer_kv_cache.testing.tiered_traffic import (
    BLOCK_TOKENS,
    PROMPT,
    PROMPT_BLOCKS,
    drive_at_random,
    make_config,
    make_drivers,
    make_request,
    require_served,
    serve_alone,
    submit,
)

_WINDOWS: tuple[tuple[int | None, ...], ...] = ((None, 6), (9,), (3, None, 14))


def check_tables_with_tiers(factory: SchedulerFactory) -> None:
    """Prefixes of sequences with windows are saved, loaded into all tables, given up, and never wrong."""
    if not SchedulerDriver(factory, make_config()).scheduler.capabilities.frees_windows:
        return
    for config in _configs():
        _check_loads(factory, config)
        _check_short_loads(factory, config)
        _check_aborts(factory, config)
        _check_random_traffic(factory, config)


def _configs() -> Iterator[SchedulerConfig]:
    for windows in _WINDOWS:
        one = make_config(table_windows=windows)
        yield make_config(num_blocks=one.blocks_for_context(one.max_model_tokens) + 5, table_windows=windows)


def _check_loads(factory: SchedulerFactory, config: SchedulerConfig) -> None:
    right = PROMPT_BLOCKS * BLOCK_TOKENS
    for driver in make_drivers(factory, config, steps=4):
        _evict_prompt(driver)
        cached = serve_alone(driver, make_request(2, PROMPT))
        what = f"windows {config.table_windows}: the tiers held {right} tokens of a prompt for every table"
        require(cached == right, f"{what}; it was scheduled with {cached} cached")
        require(bool(driver.port.loads), f"{what}, and the pool did not; nothing was loaded")
        require(driver.scheduler.stats().tier_tokens == right, "tier_tokens does not count what was loaded")


def _check_short_loads(factory: SchedulerFactory, config: SchedulerConfig) -> None:
    for driver in make_drivers(factory, config, seed=3):
        _evict_prompt(driver)
        driver.port.short_rate = 1.0
        serve_alone(driver, make_request(2, PROMPT))


def _check_aborts(factory: SchedulerFactory, config: SchedulerConfig) -> None:
    for driver in make_drivers(factory, config):
        _evict_prompt(driver)
        driver.port.load_steps = NEVER
        submit(driver, make_request(2, PROMPT))
        for _ in range(3):
            driver.step()
        driver.abort(RequestId(2))
        others = [make_request(index, (index,) * 9) for index in range(3, 8)]
        for request in others:
            submit(driver, request)
        for transfer in driver.port.pending:
            require(transfer.is_cancelled, "the load of an aborted request was not cancelled")
        driver.run()
        require_served(driver, others)


def _check_random_traffic(factory: SchedulerFactory, config: SchedulerConfig) -> None:
    for seed in range(3):
        for driver in make_drivers(factory, config, seed=seed, steps=(1, 4, 9)[seed], short_rate=0.2):
            drive_at_random(driver, random.Random(seed))  # noqa: S311 -- no secrets here


def _evict_prompt(driver: TieredDriver) -> None:
    """Serves `PROMPT`, then others until the pool has none of it."""
    serve_alone(driver, make_request(0, PROMPT))
    for index in range(10, 16):
        serve_alone(driver, make_request(index, (index,) * 28))
