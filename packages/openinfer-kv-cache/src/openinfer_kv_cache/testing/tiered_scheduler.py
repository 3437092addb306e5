"""Conformance of a scheduler that uses KV tiers: `check_tiered_scheduler(factory)` runs `TIERED_SCHEDULER_CHECKS`.

    @pytest.mark.parametrize("check", TIERED_SCHEDULER_CHECKS, ids=attrgetter("__name__"))
    def test_my_scheduler_uses_tiers(check):
        check(MyScheduler)

These come after `openinfer_core.testing.scheduler`, which knows no tiers. Each drives schedulers on a fake device whose
blocks a `FakeTierPort` fills and reads, with and without overlap, with steps that run early and late. A row that reads
a block which is being loaded, a block that is given away under a copy, and a save of what is not computed yet are
caught in the step in which they happen.
"""

import random
from collections.abc import Callable, Iterable
from typing import TypeAlias

from openinfer_core.errors import Refused
from openinfer_core.request import RequestId
from openinfer_core.testing.errors import require
from openinfer_core.testing.scheduler_driver import SchedulerFactory
from openinfer_kv_cache.testing.fake_tier_port import NEVER, TieredDriver
from openinfer_kv_cache.testing.tiered_tables import check_tables_with_tiers
from openinfer_kv_cache.testing.tiered_traffic import (
    BLOCK_TOKENS,
    PROMPT,
    PROMPT_BLOCKS,
    drive_at_random,
    evict_prompt,
    make_config,
    make_drivers,
    make_request,
    require_served,
    serve_alone,
    submit,
)

TieredSchedulerCheck: TypeAlias = Callable[[SchedulerFactory], None]


def check_tiered_scheduler(factory: SchedulerFactory) -> None:
    """Runs all of `TIERED_SCHEDULER_CHECKS`; `ConformanceError` if the scheduler does not conform."""
    for check in TIERED_SCHEDULER_CHECKS:
        check(factory)


def check_saves(factory: SchedulerFactory) -> None:
    """Every block that fills is saved, or counted in `unsaved_blocks`; its pin is given back."""
    for driver in make_drivers(factory, make_config(num_blocks=64)):
        require(driver.scheduler.capabilities.uses_kv_tiers, "it has use_tiers and does not declare uses_kv_tiers")
        prompts = [(index,) * 13 for index in range(4)]
        for index, prompt in enumerate(prompts):
            submit(driver, make_request(index, prompt))
        driver.run()
        told = len(driver.port.contents) + driver.scheduler.stats().unsaved_blocks
        least = len(prompts) * PROMPT_BLOCKS
        require(told >= least, f"{least} blocks of prompts were computed; {told} were saved or counted as unsaved")
        require(bool(driver.port.saves), "no block was saved: the scheduler never asks its port to")


def check_loads(factory: SchedulerFactory) -> None:
    """A prefix that the pool has evicted comes back from the tiers, with every token of it counted as cached."""
    for steps in (1, 5):
        for driver in make_drivers(factory, make_config(), steps=steps):
            evict_prompt(driver)
            cached = serve_alone(driver, make_request(2, PROMPT))
            right = PROMPT_BLOCKS * BLOCK_TOKENS
            require(
                cached == right, f"the tiers held {right} tokens of a prompt; it was scheduled with {cached} cached"
            )
            require(driver.scheduler.stats().tier_tokens == right, "tier_tokens does not count what was loaded")


def check_short_loads(factory: SchedulerFactory) -> None:
    """What a load did not complete is computed, and only that counts as cached that did."""
    for driver in make_drivers(factory, make_config(), seed=3):
        evict_prompt(driver)
        driver.port.short_rate = 1.0
        cached = serve_alone(driver, make_request(2, PROMPT))
        completed = driver.port.loads[-1].completed_blocks * BLOCK_TOKENS
        require(cached == completed, f"{completed} tokens of a load completed; {cached} count as cached")


def check_restart(factory: SchedulerFactory) -> None:
    """What one process saved, another one finds: blocks are named with the config's digest key and layout digest."""
    config = make_config()
    for driver in make_drivers(factory, config):
        serve_alone(driver, make_request(0, PROMPT))
        again = TieredDriver(factory, config, contents=driver.port.contents)
        cached = serve_alone(again, make_request(0, PROMPT))
        right = PROMPT_BLOCKS * BLOCK_TOKENS
        require(
            cached == right,
            f"after a restart {cached} of {right} tokens were found again: make the cache with config.digest_key",
        )


def check_aborts_while_loading(factory: SchedulerFactory) -> None:
    """A request that is aborted while it loads ends at once; its blocks stay until no copy touches them."""
    for driver in make_drivers(factory, make_config()):
        evict_prompt(driver)
        driver.port.load_steps = NEVER
        submit(driver, make_request(2, PROMPT))
        for _ in range(3):
            driver.step()
        require(len(driver.port.pending) == 1, "a prefix that the tiers hold is not being loaded")
        stats = driver.scheduler.stats()
        require(stats.loading == 1 and stats.waiting >= 1, "a loading request counts in loading, and in waiting")
        driver.abort(RequestId(2))
        driver.step()
        if driver.port.pending:
            require(driver.scheduler.stats().blocks_used > 0, "blocks were given back while a load writes to them")
        for index in range(3, 8):
            submit(driver, make_request(index, (index,) * 9))
        for transfer in driver.port.pending:
            require(transfer.is_cancelled, "the load of an aborted request was not cancelled")
        driver.run()


def check_slow_saves(factory: SchedulerFactory) -> None:
    """Saves that take long neither wedge a small pool nor are their blocks given away."""
    config = make_config(num_blocks=10)
    for driver in make_drivers(factory, config, steps=12):
        requests = [make_request(index, (index, *PROMPT), max_tokens=8) for index in range(10)]
        for request in requests:
            submit(driver, request)
        driver.run()
        require_served(driver, requests)


def check_log_probabilities_of_loaded_prompts(factory: SchedulerFactory) -> None:
    """A prompt whose log-probabilities are asked for is computed, also where the tiers hold it."""
    for driver in make_drivers(factory, make_config()):
        evict_prompt(driver)
        request = make_request(2, PROMPT, prompt_logprobs=1)
        submit(driver, request)
        driver.run()
        require_served(driver, [request])


def check_tenants_apart(factory: SchedulerFactory) -> None:
    """Equal prompts under other salts, or with other adapters, share no block in the tiers."""
    names = [(None, None), ("salt", None), (None, "adapter"), ("salt", "adapter")]
    for driver in make_drivers(factory, make_config()):
        for index, (salt, lora) in enumerate(names):
            cached = serve_alone(driver, make_request(2 * index, PROMPT, cache_salt=salt, lora=lora))
            require(cached == 0, f"salt {salt}, adapter {lora}: {cached} tokens of another tenant were cached")
            serve_alone(driver, make_request(2 * index + 1, (40 + index,) * 28))


def check_states(factory: SchedulerFactory) -> None:
    """A model with recurrent states is refused by `use_tiers` (`Refused`), or loaded with its states: never without."""
    config = make_config(prefix_cache=False, num_snapshots=3)
    try:
        drivers = list(make_drivers(factory, config))
    except Refused as refusal:
        require(bool(str(refusal)), "use_tiers refused without a message")
        return
    for driver in drivers:
        for index in range(4):
            for request in (make_request(2 * index, PROMPT), make_request(2 * index + 1, (20 + index,) * 26)):
                submit(driver, request)
                driver.run()
                require_served(driver, [request])


def check_random_tier_traffic(factory: SchedulerFactory, *, seeds: Iterable[int] = range(8)) -> None:
    """Arrivals with common prefixes, aborts, failing rows and transfers that fall short, over random limits."""
    for seed in seeds:
        rng = random.Random(seed)  # noqa: S311 -- no secrets here
        config = make_config(num_blocks=rng.choice((8, 9, 12, 24)), max_step_tokens=rng.choice((4, 8, 16)))
        steps, prefetch_blocks = rng.choice((1, 4, 9)), (0, 3, 12)[seed % 3]
        for driver in make_drivers(
            factory, config, seed=seed, steps=steps, short_rate=0.2, prefetch_blocks=prefetch_blocks
        ):
            drive_at_random(driver, random.Random(seed))  # noqa: S311 -- no secrets here


# The narrow ones first.
TIERED_SCHEDULER_CHECKS: tuple[TieredSchedulerCheck, ...] = (
    check_saves,
    check_loads,
    check_short_loads,
    check_restart,
    check_aborts_while_loading,
    check_slow_saves,
    check_log_probabilities_of_loaded_prompts,
    check_tenants_apart,
    check_states,
    check_tables_with_tiers,
    check_random_tier_traffic,
)
