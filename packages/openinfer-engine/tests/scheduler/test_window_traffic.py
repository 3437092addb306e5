"""Several block tables: random chats of several turns over random limits, with tiers, drafts, grammars and aborts.

The fake device compares every KV entry that a row reads in each table, and the driver every token.
"""

import os
import random
from collections import Counter
from typing import Any

import msgspec
import pytest

from openinfer_core import GenerateRequest, RequestId, TokenEvent
from openinfer_core.queue_policies import FirstComeFirstServed
from openinfer_core.scheduling import QueuePolicy, QueuePolicyConfig, SchedulerConfig, StepPlan, StepResult
from openinfer_core.testing.fake_drafter import DraftScript
from openinfer_core.testing.fake_model import NUM_TOKEN_IDS
from openinfer_core.testing.scheduler_driver import RunsAt, SchedulerDriver
from openinfer_core.testing.scheduler_traffic import check_serves_on, random_request, submit_served
from openinfer_engine.guard.plan_check import PlanCheck
from openinfer_engine.scheduler import TokenBudgetScheduler
from openinfer_kv_cache.testing.fake_tier_port import FakeTierPort

# So many times the requests, for a longer look than CI's.
SCALE = float(os.environ.get("OPENINFER_TEST_SCALE", "1"))
WINDOWS = (1, 2, 3, 5, 8, 16, 17, 33, 80)  # within a block and beyond the longest context, too


class PlanChecked(TokenBudgetScheduler):
    """The guard looks at its plans, and its books are compared now and then."""

    def __init__(self, config: SchedulerConfig, policy: QueuePolicy) -> None:
        super().__init__(config, policy)
        self.plan_check = PlanCheck(config, num_token_ids=NUM_TOKEN_IDS)

    def plan(self, *, now_s: float) -> StepPlan | None:
        plan = super().plan(now_s=now_s)
        if plan is not None:
            self.plan_check.check(plan)
            if plan.step % 8 == 0:
                self.check_integrity()
        return plan

    def apply(self, plan: StepPlan, result: StepResult, *, now_s: float) -> list[TokenEvent]:
        self.plan_check.applied(plan, result)
        return super().apply(plan, result, now_s=now_s)


class ChatDriver(SchedulerDriver):
    """With KV tiers, if asked for."""

    def __init__(self, config: SchedulerConfig, rng: random.Random, *, has_tiers: bool, drafts: DraftScript) -> None:
        self.port: FakeTierPort | None = None
        super().__init__(
            PlanChecked,
            config,
            policy=FirstComeFirstServed(QueuePolicyConfig()),
            max_in_flight=rng.choice((1, 2, 2)),
            runs_at=rng.choice(list(RunsAt)),
            is_moving=lambda: self.port is not None and bool(self.port.pending),
            drafts=drafts,
        )
        if has_tiers:
            self.port = FakeTierPort(
                self.device, config, seed=rng.randrange(99), steps=rng.choice((1, 4, 12)), short_rate=0.2
            )
            scheduler: Any = self.scheduler
            scheduler.use_tiers(self.port)

    def plan(self) -> StepPlan | None:
        if self.port is not None:
            self.port.tick()
        return super().plan()


def random_config(rng: random.Random) -> SchedulerConfig:
    num_global = rng.choice((0, 1, 1, 2))
    windows = (None,) * num_global + tuple(rng.choice(WINDOWS) for _ in range(rng.randint(1, 4 - num_global)))
    max_num_seqs = rng.choice((1, 2, 5, 8))
    config = SchedulerConfig(
        num_blocks=1,
        block_size_tokens=rng.choice((1, 2, 4, 16)),
        table_windows=windows,
        max_num_seqs=max_num_seqs,
        max_step_tokens=rng.choice((max_num_seqs, max_num_seqs + 3, 4 * max_num_seqs + 16)),
        max_model_tokens=rng.choice((24, 40, 64)),
        prefix_cache=rng.random() < 0.8,
        max_drafts=rng.choice((0, 0, 1, 3, 7)),
    )
    # One token is never computed: the last that is sampled.
    least = config.blocks_for_context(config.max_model_tokens - 1)
    num_blocks = rng.choice((least, least + 1, least + 4, 2 * least, 8 * least))
    return msgspec.structs.replace(config, num_blocks=num_blocks)


def drive_chats(driver: ChatDriver, rng: random.Random) -> None:
    """Most requests are the next turn of a chat: its turns so far, the answers to them, and a few ids more."""
    chats: list[tuple[int, ...]] = [()] * 3
    longest = driver.config.max_model_tokens
    for request_id in range(24):
        request = random_request(request_id, longest, rng)
        if request.sampling.max_tokens > 20:
            sampling = msgspec.structs.replace(request.sampling, max_tokens=rng.choice((4, 9, longest)))
            request = msgspec.structs.replace(request, sampling=sampling)
        if rng.random() < 0.6:
            chat = rng.randrange(len(chats))
            prompt = (*chats[chat], *request.prompt_token_ids[-rng.randint(1, 9) :])
            if len(prompt) >= longest:
                prompt = request.prompt_token_ids
            request = msgspec.structs.replace(request, prompt_token_ids=prompt, cache_salt=None, lora=None)
            chats[chat] = (*prompt, *driver.outcome(request).token_ids)
        submit_served(driver, request)
        for _ in range(rng.choice((0, 0, 1, 4, 12))):
            driver.step()
        if rng.random() < 0.1:
            driver.abort(RequestId(rng.randrange(request_id + 1)))
        if rng.random() < 0.05:
            driver.device.fail_next_row(request.request_id)
    driver.run()


@pytest.mark.parametrize("kind", ["plain", "tiers", "pressure"])
def test_random_chats_have_their_tokens_in_every_table(kind: str) -> None:
    """Over 3,000 requests over all kinds; pools go down to what the longest request needs by itself."""
    totals: Counter[str] = Counter()
    num_drivers = round(42 * SCALE)
    for seed in range(num_drivers):
        rng = random.Random(f"{kind} {seed}")
        config = random_config(rng)
        if kind == "pressure":
            least = config.blocks_for_context(config.max_model_tokens - 1)
            config = msgspec.structs.replace(
                config, num_blocks=least + rng.randrange(3), max_num_seqs=5, max_step_tokens=rng.choice((5, 9, 40))
            )
        has_tiers = kind == "tiers"
        config = msgspec.structs.replace(config, prefix_cache=config.prefix_cache or has_tiers)
        driver = ChatDriver(config, rng, has_tiers=has_tiers, drafts=rng.choice(list(DraftScript)))
        if kind == "pressure":
            submit_long_outputs(driver, rng)
        drive_chats(driver, rng)
        check_serves_on(driver)
        stats = driver.stats()
        totals += Counter(
            requests=len(driver.accounts),
            preemptions=stats.preemptions,
            cached=stats.cached_tokens,
            loaded=stats.tier_tokens,
            drafts=stats.spec_decode_num_drafts,
        )
    assert totals["requests"] >= 24 * num_drivers
    assert totals["cached"] > 10 * num_drivers
    assert totals["drafts"] > num_drivers
    assert totals["preemptions"] >= (num_drivers if kind == "pressure" else 0)
    assert (totals["loaded"] > num_drivers) is (kind == "tiers")


def submit_long_outputs(driver: SchedulerDriver, rng: random.Random) -> None:
    """Requests that each could fill the pool; ids are far from those of the random ones."""
    for index in range(5):
        request = random_request(1000 + index, driver.config.max_model_tokens, rng)
        sampling = msgspec.structs.replace(
            request.sampling, max_tokens=driver.config.max_model_tokens, stop_token_ids=(), min_tokens=0
        )
        prompt = (index, rng.randrange(NUM_TOKEN_IDS))
        driver.submit(
            GenerateRequest(request_id=request.request_id, prompt_token_ids=prompt, sampling=sampling, tenant="")
        )
