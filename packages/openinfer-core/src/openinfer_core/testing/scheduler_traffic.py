"""Configs and requests that the scheduler's kit drives schedulers with, and what is asked of all of them."""

import random
from collections.abc import Iterable

import msgspec

from openinfer_core.events import Scheduled
from openinfer_core.request import GenerateRequest, LoadedAdapter, RequestId
from openinfer_core.sampling import Grammar, GrammarKind, SamplingParams
from openinfer_core.scheduling import SchedulerConfig
from openinfer_core.testing import fake_model
from openinfer_core.testing.errors import require
from openinfer_core.testing.scheduler_driver import SchedulerDriver

# No compiler is asked, and the fake device heeds no mask.
GRAMMAR = Grammar(kind=GrammarKind.REGEX, text=".*")


def make_config(
    *,
    num_blocks: int = 64,
    block_size_tokens: int = 4,
    max_num_seqs: int = 4,
    max_step_tokens: int = 16,
    max_model_tokens: int = 64,
    max_waiting: int = 64,
    table_windows: tuple[int | None, ...] = (None,),
) -> SchedulerConfig:
    return SchedulerConfig(
        num_blocks=num_blocks,
        block_size_tokens=block_size_tokens,
        max_num_seqs=max_num_seqs,
        max_step_tokens=max_step_tokens,
        max_model_tokens=max_model_tokens,
        max_waiting=max_waiting,
        table_windows=table_windows,
    )


def make_request(
    request_id: int,
    *,
    prompt: tuple[int, ...],
    max_tokens: int,
    priority: int = 0,
    cache_salt: str | None = None,
    lora: str | None = None,
    adapter: LoadedAdapter | None = None,
    seed: int | None = None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    grammar: Grammar | None = None,
    stop_token_ids: tuple[int, ...] = (),
    min_tokens: int = 0,
) -> GenerateRequest:
    return GenerateRequest(
        request_id=RequestId(request_id),
        prompt_token_ids=prompt,
        sampling=SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stop_token_ids=stop_token_ids,
            seed=seed,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            grammar=grammar,
        ),
        priority=priority,
        cache_salt=cache_salt,
        lora=lora,
        adapter=adapter,
    )


def random_config(rng: random.Random, *, table_windows: tuple[int | None, ...] = (None,)) -> SchedulerConfig:
    block_size_tokens = rng.choice((1, 2, 4, 16))
    max_model_tokens = rng.choice((24, 40, 64))
    max_num_seqs = rng.choice((1, 2, 5, 8))
    contexts, more_blocks = rng.choice(((1, 0), (1, 3), (3, 0), (12, 0)))
    config = SchedulerConfig(
        num_blocks=1,
        block_size_tokens=block_size_tokens,
        table_windows=table_windows,
        max_num_seqs=max_num_seqs,
        max_step_tokens=rng.choice((max_num_seqs, max_num_seqs + 3, 4 * max_num_seqs + 16)),
        max_model_tokens=max_model_tokens,
        prefix_cache=rng.random() < 0.8,
    )
    num_blocks = contexts * config.blocks_for_context(max_model_tokens) + more_blocks
    return msgspec.structs.replace(config, num_blocks=num_blocks)


def drive_at_random(driver: SchedulerDriver, rng: random.Random) -> None:
    for request_id in range(rng.choice((10, 40))):
        request = random_request(request_id, driver.config.max_model_tokens, rng)
        submit_served(driver, request)
        for _ in range(rng.choice((0, 0, 1, 4))):
            driver.step()
        if rng.random() < 0.15:
            driver.abort(RequestId(rng.randrange(request_id + 1)))
        if rng.random() < 0.05:
            driver.device.fail_next_row(request.request_id)
    driver.run()


def random_request(request_id: int, max_model_tokens: int, rng: random.Random) -> GenerateRequest:
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
            grammar=rng.choice((None, None, GRAMMAR)),
        ),
        cache_salt=rng.choice((None, None, "a", "b")),
        lora=rng.choice((None, None, None, "adapter")),
        tenant=rng.choice(("", "gold", "free")),
        priority=rng.choice((0, 0, 0, -1, 1)),
        # The host would end it; a scheduler may know that it cannot be served in time, if it declares that.
        deadline_s=0.02 if request_id % 5 == 3 else None,
        hints={"sender": "kit"} if request_id % 7 == 4 else {},
    )


def submit_served(driver: SchedulerDriver, request: GenerateRequest) -> None:
    terminal = driver.submit(request)
    require(terminal is None, f"request {request.request_id} can be served; add answered {terminal}")


def check_served_in_full(driver: SchedulerDriver, requests: Iterable[GenerateRequest]) -> None:
    for request in requests:
        account = driver.accounts[request.request_id]
        if driver.is_shed(account):
            continue
        require(isinstance(account.scheduled, Scheduled), f"{account.what} has no Scheduled event")
        require(
            tuple(account.token_ids) == driver.outcome(request).token_ids,
            f"{account.what} got {account.token_ids}, {account.terminal}; the model gives {driver.outcome(request)}",
        )


def check_serves_on(driver: SchedulerDriver) -> None:
    # As long as the context, with everything to itself: blocks and slots that leaked before are missed here.
    request_id = max(driver.accounts) + 1
    prompt = (request_id % fake_model.NUM_TOKEN_IDS,) * (driver.config.max_model_tokens // 2)
    request = make_request(request_id, prompt=prompt, max_tokens=driver.config.max_model_tokens)
    submit_served(driver, request)
    driver.run()
    account = driver.accounts[request.request_id]
    require(
        not driver.is_shed(account), f"{account.what} was alone and has no deadline; it ended with {account.terminal}"
    )
    check_served_in_full(driver, [request])
