"""Checks of the scheduler's kit for `HoldsRows`: requests that have no mask yet sit steps out, and all are served."""

import random
from typing import Any

from openinfer_core.request import RequestId
from openinfer_core.scheduling import HoldsRows
from openinfer_core.testing.errors import require
from openinfer_core.testing.scheduler_driver import SchedulerDriver, SchedulerFactory
from openinfer_core.testing.scheduler_traffic import (
    GRAMMAR,
    check_served_in_full,
    check_serves_on,
    make_config,
    make_request,
    submit_served,
)

_MAX_STEPS = 20_000


def check_late_masks(factory: SchedulerFactory) -> None:
    """Masks that come some steps late, while blocks are short: held requests do not sample, and none is lost."""
    for seed in range(8):
        rng = random.Random(seed)  # noqa: S311 - no secrets here
        driver = _driver(factory, num_blocks=14, max_num_seqs=5, max_in_flight=1 + seed % 2)
        if not isinstance(driver.scheduler, HoldsRows):
            return
        known: dict[RequestId, int] = {}
        late: dict[RequestId, int] = {}
        for _ in range(_MAX_STEPS):
            if not driver.scheduler.unfinished_ids and not driver.num_in_flight:
                break
            for request_id, account in driver.accounts.items():
                if account.request.sampling.is_masked and len(account.token_ids) > known.get(request_id, 0):
                    known[request_id], late[request_id] = len(account.token_ids), rng.choice((0, 0, 1, 3))
            driver.hold({request_id for request_id, steps in late.items() if steps > 0})
            late = {request_id: steps - 1 for request_id, steps in late.items()}
            driver.step()
        _finish(driver)


def check_masks_that_do_not_come(factory: SchedulerFactory) -> None:
    """While requests with a grammar are held after their first token, all others are served to their end.

    There are slots and blocks for all: those that are held keep theirs.
    """
    for max_in_flight in (1, 2):
        driver = _driver(factory, num_blocks=200, max_num_seqs=12, max_in_flight=max_in_flight)
        if not isinstance(driver.scheduler, HoldsRows):
            return
        free = [account for account in driver.accounts.values() if not account.request.sampling.is_masked]
        for _ in range(_MAX_STEPS):
            if all(account.terminal is not None for account in free):
                break
            masked = [account for account in driver.accounts.values() if account.request.sampling.is_masked]
            driver.hold({account.request.request_id for account in masked if account.token_ids})
            driver.step()
        waiting = [account.what for account in free if account.terminal is None]
        require(not waiting, f"{waiting} have no grammar and wait for requests that are held")
        _finish(driver)


def _driver(factory: SchedulerFactory, *, num_blocks: int, max_num_seqs: int, max_in_flight: int) -> SchedulerDriver:
    limits: dict[str, Any] = {"block_size_tokens": 2, "max_step_tokens": 12, "max_model_tokens": 20}
    config = make_config(num_blocks=num_blocks, max_num_seqs=max_num_seqs, **limits)
    driver = SchedulerDriver(factory, config, max_in_flight=max_in_flight)
    for index in range(12):
        grammar = GRAMMAR if index % 3 else None
        submit_served(driver, make_request(index, prompt=(index, 1, 2), max_tokens=12, grammar=grammar))
    return driver


def _finish(driver: SchedulerDriver) -> None:
    driver.hold(frozenset())
    driver.run()
    check_served_in_full(driver, [account.request for account in driver.accounts.values()])
    check_serves_on(driver)


HOLD_CHECKS = (check_late_masks, check_masks_that_do_not_come)
