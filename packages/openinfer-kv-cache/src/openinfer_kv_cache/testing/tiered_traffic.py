"""What the checks of schedulers with KV tiers send: prompts that share prefixes, in pools too small for all of them."""

import random
from collections.abc import Iterable, Iterator, Sequence

from openinfer_core.events import Scheduled
from openinfer_core.request import GenerateRequest, RequestId
from openinfer_core.sampling import SamplingParams
from openinfer_core.scheduling import SchedulerConfig
from openinfer_core.testing.errors import require
from openinfer_core.testing.scheduler_driver import RunsAt, SchedulerDriver, SchedulerFactory
from openinfer_kv_cache.testing.fake_tier_port import TieredDriver

KEY = b"the kit's digest key"
BLOCK_TOKENS = 4
PROMPT = tuple(range(1, 14))
PROMPT_BLOCKS = 3  # of `PROMPT`, that are full and leave a token to compute


def make_drivers(
    factory: SchedulerFactory,
    config: SchedulerConfig,
    *,
    seed: int = 0,
    steps: int = 1,
    short_rate: float = 0.0,
    prefetch_blocks: int = 0,
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
                prefetch_blocks=prefetch_blocks,
            )


def make_config(
    *,
    num_blocks: int = 8,
    max_step_tokens: int = 12,
    prefix_cache: bool = True,
    num_snapshots: int = 0,
    table_windows: tuple[int | None, ...] = (None,),
) -> SchedulerConfig:
    return SchedulerConfig(
        num_blocks=num_blocks,
        block_size_tokens=BLOCK_TOKENS,
        max_num_seqs=4,
        max_step_tokens=max_step_tokens,
        max_model_tokens=32,
        prefix_cache=prefix_cache,
        num_snapshots=num_snapshots,
        table_windows=table_windows,
        layout_digest="the kit's layout",
        digest_key=KEY,
    )


def make_request(
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


def submit(driver: SchedulerDriver, request: GenerateRequest) -> None:
    terminal = driver.submit(request)
    require(terminal is None, f"request {request.request_id} fits; add answered {terminal}")


def serve_alone(driver: SchedulerDriver, request: GenerateRequest) -> int:
    """Serves a request alone."""
    submit(driver, request)
    driver.run()
    require_served(driver, [request])
    scheduled = driver.accounts[request.request_id].scheduled
    return 0 if scheduled is None else scheduled.cached_tokens


def evict_prompt(driver: TieredDriver) -> None:
    """Serves `PROMPT`, then a prompt that takes the whole pool."""
    serve_alone(driver, make_request(0, PROMPT))
    serve_alone(driver, make_request(1, (20,) * 28))


def require_served(driver: SchedulerDriver, requests: Iterable[GenerateRequest]) -> None:
    for request in requests:
        account = driver.accounts[request.request_id]
        if driver.is_shed(account):
            continue
        require(isinstance(account.scheduled, Scheduled), f"{account.what} has no Scheduled event")
        right = driver.outcome(request).token_ids
        require(tuple(account.token_ids) == right, f"{account.what} ended with {account.terminal}")


def drive_at_random(driver: TieredDriver, rng: random.Random) -> None:
    prefixes = ((), PROMPT[:4], PROMPT[:8], PROMPT[:12])
    for index in range(24):
        own = [rng.randrange(64) for _ in range(rng.randint(1, 9))]
        request = make_request(
            index,
            (*rng.choice(prefixes), *own),
            max_tokens=rng.choice((1, 3, 9)),
            cache_salt=rng.choice((None, None, "salt")),
            prompt_logprobs=rng.choice((None, None, None, 0)),
        )
        submit(driver, request)
        for _ in range(rng.randint(0, 5)):
            driver.step()
        if rng.random() < 0.15:
            driver.abort(RequestId(rng.randint(0, index)))
        if rng.random() < 0.1:
            driver.device.fail_next_row(RequestId(rng.randint(0, index)))
    driver.run()
