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
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

from openinfer_core.errors import Refused
from openinfer_core.events import Scheduled
from openinfer_core.request import GenerateRequest, RequestId
from openinfer_core.sampling import SamplingParams
from openinfer_core.scheduling import SchedulerConfig
from openinfer_core.testing.errors import require
from openinfer_core.testing.scheduler_driver import RunsAt, SchedulerDriver, SchedulerFactory
from openinfer_kv_cache.testing.fake_tier_port import NEVER, TieredDriver

TieredSchedulerCheck: TypeAlias = Callable[[SchedulerFactory], None]

_KEY = b"the kit's digest key"
_BLOCK_TOKENS = 4
_PROMPT = tuple(range(1, 14))
_PROMPT_BLOCKS = 3  # of `_PROMPT`, that are full and leave a token to compute


def check_tiered_scheduler(factory: SchedulerFactory) -> None:
    """Runs all of `TIERED_SCHEDULER_CHECKS`; `ConformanceError` if the scheduler does not conform."""
    for check in TIERED_SCHEDULER_CHECKS:
        check(factory)


def check_saves(factory: SchedulerFactory) -> None:
    """Every block that fills is saved, or counted in `unsaved_blocks`; its pin is given back."""
    for driver in _drivers(factory, _config(num_blocks=64)):
        require(driver.scheduler.capabilities.uses_kv_tiers, "it has use_tiers and does not declare uses_kv_tiers")
        prompts = [(index,) * 13 for index in range(4)]
        for index, prompt in enumerate(prompts):
            _submit(driver, _request(index, prompt))
        driver.run()
        told = len(driver.port.contents) + driver.scheduler.stats().unsaved_blocks
        least = len(prompts) * _PROMPT_BLOCKS
        require(told >= least, f"{least} blocks of prompts were computed; {told} were saved or counted as unsaved")
        require(bool(driver.port.saves), "no block was saved: the scheduler never asks its port to")


def check_loads(factory: SchedulerFactory) -> None:
    """A prefix that the pool has evicted comes back from the tiers, with every token of it counted as cached."""
    for steps in (1, 5):
        for driver in _drivers(factory, _config(), steps=steps):
            _evict_prompt(driver)
            cached = _cached_tokens(driver, _request(2, _PROMPT))
            right = _PROMPT_BLOCKS * _BLOCK_TOKENS
            require(
                cached == right, f"the tiers held {right} tokens of a prompt; it was scheduled with {cached} cached"
            )
            require(driver.scheduler.stats().tier_tokens == right, "tier_tokens does not count what was loaded")


def check_short_loads(factory: SchedulerFactory) -> None:
    """What a load did not complete is computed, and only that counts as cached that did."""
    for driver in _drivers(factory, _config(), seed=3):
        _evict_prompt(driver)
        driver.port.short_rate = 1.0
        cached = _cached_tokens(driver, _request(2, _PROMPT))
        completed = driver.port.loads[-1].completed_blocks * _BLOCK_TOKENS
        require(cached == completed, f"{completed} tokens of a load completed; {cached} count as cached")


def check_restart(factory: SchedulerFactory) -> None:
    """What one process saved, another one finds: blocks are named with the config's digest key and layout digest."""
    config = _config()
    for driver in _drivers(factory, config):
        _cached_tokens(driver, _request(0, _PROMPT))
        again = TieredDriver(factory, config, contents=driver.port.contents)
        cached = _cached_tokens(again, _request(0, _PROMPT))
        right = _PROMPT_BLOCKS * _BLOCK_TOKENS
        require(
            cached == right,
            f"after a restart {cached} of {right} tokens were found again: make the cache with config.digest_key",
        )


def check_aborts_while_loading(factory: SchedulerFactory) -> None:
    """A request that is aborted while it loads ends at once; its blocks stay until no copy touches them."""
    for driver in _drivers(factory, _config()):
        _evict_prompt(driver)
        driver.port.load_steps = NEVER
        _submit(driver, _request(2, _PROMPT))
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
            _submit(driver, _request(index, (index,) * 9))
        for transfer in driver.port.pending:
            require(transfer.is_cancelled, "the load of an aborted request was not cancelled")
        driver.run()


def check_slow_saves(factory: SchedulerFactory) -> None:
    """Saves that take long neither wedge a small pool nor are their blocks given away."""
    config = _config(num_blocks=10)
    for driver in _drivers(factory, config, steps=12):
        requests = [_request(index, (index, *_PROMPT), max_tokens=8) for index in range(10)]
        for request in requests:
            _submit(driver, request)
        driver.run()
        _require_served(driver, requests)


def check_log_probabilities_of_loaded_prompts(factory: SchedulerFactory) -> None:
    """A prompt whose log-probabilities are asked for is computed, also where the tiers hold it."""
    for driver in _drivers(factory, _config()):
        _evict_prompt(driver)
        request = _request(2, _PROMPT, prompt_logprobs=1)
        _submit(driver, request)
        driver.run()
        _require_served(driver, [request])


def check_tenants_apart(factory: SchedulerFactory) -> None:
    """Equal prompts under other salts, or with other adapters, share no block in the tiers."""
    names = [(None, None), ("salt", None), (None, "adapter"), ("salt", "adapter")]
    for driver in _drivers(factory, _config()):
        for index, (salt, lora) in enumerate(names):
            cached = _cached_tokens(driver, _request(2 * index, _PROMPT, cache_salt=salt, lora=lora))
            require(cached == 0, f"salt {salt}, adapter {lora}: {cached} tokens of another tenant were cached")
            _cached_tokens(driver, _request(2 * index + 1, (40 + index,) * 28))


def check_states(factory: SchedulerFactory) -> None:
    """A model with recurrent states is refused by `use_tiers` (`Refused`), or loaded with its states: never without."""
    config = _config(prefix_cache=False, num_snapshots=3)
    try:
        drivers = list(_drivers(factory, config))
    except Refused as refusal:
        require(bool(str(refusal)), "use_tiers refused without a message")
        return
    for driver in drivers:
        for index in range(4):
            for request in (_request(2 * index, _PROMPT), _request(2 * index + 1, (20 + index,) * 26)):
                _submit(driver, request)
                driver.run()
                _require_served(driver, [request])


def check_random_tier_traffic(factory: SchedulerFactory, *, seeds: Iterable[int] = range(8)) -> None:
    """Arrivals with common prefixes, aborts, failing rows and transfers that fall short, over random limits."""
    for seed in seeds:
        rng = random.Random(seed)  # noqa: S311 -- no secrets here
        config = _config(num_blocks=rng.choice((8, 9, 12, 24)), max_step_tokens=rng.choice((4, 8, 16)))
        for driver in _drivers(factory, config, seed=seed, steps=rng.choice((1, 4, 9)), short_rate=0.2):
            _drive_at_random(driver, random.Random(seed))  # noqa: S311 -- no secrets here


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
    check_random_tier_traffic,
)


# --- traffic --------------------------------------------------------------------------------------------


def _drivers(
    factory: SchedulerFactory, config: SchedulerConfig, *, seed: int = 0, steps: int = 1, short_rate: float = 0.0
) -> Iterator[TieredDriver]:
    for max_in_flight in (1, 2):
        for runs_at in RunsAt:
            yield TieredDriver(
                factory,
                config,
                max_in_flight=max_in_flight,
                runs_at=runs_at,
                seed=seed,
                steps=steps,
                short_rate=short_rate,
            )


def _config(
    *, num_blocks: int = 8, max_step_tokens: int = 12, prefix_cache: bool = True, num_snapshots: int = 0
) -> SchedulerConfig:
    return SchedulerConfig(
        num_blocks=num_blocks,
        block_size_tokens=_BLOCK_TOKENS,
        max_num_seqs=4,
        max_step_tokens=max_step_tokens,
        max_model_tokens=32,
        prefix_cache=prefix_cache,
        num_snapshots=num_snapshots,
        layout_digest="the kit's layout",
        digest_key=_KEY,
    )


def _request(
    request_id: int,
    prompt: Sequence[int],
    *,
    max_tokens: int = 3,
    cache_salt: str | None = None,
    lora: str | None = None,
    prompt_logprobs: int | None = None,
) -> GenerateRequest:
    return GenerateRequest(
        request_id=RequestId(request_id),
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(max_tokens=max_tokens, prompt_logprobs=prompt_logprobs),
        cache_salt=cache_salt,
        lora=lora,
    )


def _submit(driver: SchedulerDriver, request: GenerateRequest) -> None:
    terminal = driver.submit(request)
    require(terminal is None, f"request {request.request_id} fits; add answered {terminal}")


def _cached_tokens(driver: SchedulerDriver, request: GenerateRequest) -> int:
    """Serves a request alone."""
    _submit(driver, request)
    driver.run()
    _require_served(driver, [request])
    scheduled = driver.accounts[request.request_id].scheduled
    return 0 if scheduled is None else scheduled.cached_tokens


def _evict_prompt(driver: TieredDriver) -> None:
    """Serves `_PROMPT`, then a prompt that takes the whole pool."""
    _cached_tokens(driver, _request(0, _PROMPT))
    _cached_tokens(driver, _request(1, (20,) * 28))


def _require_served(driver: SchedulerDriver, requests: Iterable[GenerateRequest]) -> None:
    for request in requests:
        account = driver.accounts[request.request_id]
        if driver.is_shed(account):
            continue
        require(isinstance(account.scheduled, Scheduled), f"{account.what} has no Scheduled event")
        right = driver.outcome(request).token_ids
        require(tuple(account.token_ids) == right, f"{account.what} ended with {account.terminal}")


def _drive_at_random(driver: TieredDriver, rng: random.Random) -> None:
    prefixes = ((), _PROMPT[:4], _PROMPT[:8], _PROMPT[:12])
    for index in range(24):
        own = [rng.randrange(64) for _ in range(rng.randint(1, 9))]
        request = _request(
            index,
            (*rng.choice(prefixes), *own),
            max_tokens=rng.choice((1, 3, 9)),
            cache_salt=rng.choice((None, None, "salt")),
            prompt_logprobs=rng.choice((None, None, None, 0)),
        )
        _submit(driver, request)
        for _ in range(rng.randint(0, 5)):
            driver.step()
        if rng.random() < 0.15:
            driver.abort(RequestId(rng.randint(0, index)))
        if rng.random() < 0.1:
            driver.device.fail_next_row(RequestId(rng.randint(0, index)))
    driver.run()
