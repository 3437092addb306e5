"""A driven scheduler with small limits, and requests for it; the helpers of these tests are imported by name."""

import sys
from pathlib import Path
from typing import Any, Protocol

import pytest

from openinfer_core import GenerateRequest, RequestId, SamplingParams
from openinfer_core.queue_policies import FirstComeFirstServed
from openinfer_core.scheduling import QueuePolicy, QueuePolicyConfig, SchedulerConfig
from openinfer_core.testing.scheduler_driver import SchedulerDriver
from openinfer_engine.scheduler import TokenBudgetScheduler

sys.path.insert(0, str(Path(__file__).parent))

LIMITS = {
    "num_blocks": 64,
    "block_size_tokens": 4,
    "max_num_seqs": 4,
    "max_step_tokens": 16,
    "max_model_tokens": 64,
}


class MakeDriver(Protocol):
    def __call__(
        self, *, max_in_flight: int = 1, policy: QueuePolicy | None = None, **limits: Any
    ) -> SchedulerDriver: ...


class MakeRequest(Protocol):
    def __call__(self, request_id: int, prompt: tuple[int, ...], /, **sampling: Any) -> GenerateRequest: ...


class CheckedScheduler(TokenBudgetScheduler):
    """Checks its books after every verb."""

    def plan(self, **arguments: Any) -> Any:
        plan = super().plan(**arguments)
        self.check_integrity()
        return plan

    def apply(self, *arguments: Any, **named: Any) -> Any:
        events = super().apply(*arguments, **named)
        self.check_integrity()
        return events

    def add(self, *arguments: Any, **named: Any) -> Any:
        events = super().add(*arguments, **named)
        self.check_integrity()
        return events

    def abort(self, *arguments: Any) -> Any:
        events = super().abort(*arguments)
        self.check_integrity()
        return events


@pytest.fixture(scope="session")
def checked_scheduler() -> type[TokenBudgetScheduler]:
    return CheckedScheduler


@pytest.fixture(scope="session")
def make_driver() -> MakeDriver:
    """Drives a scheduler whose limits are 4 sequences, 16 tokens a step, 64 blocks of 4 tokens, unless changed."""

    def make(*, max_in_flight: int = 1, policy: QueuePolicy | None = None, **limits: Any) -> SchedulerDriver:
        config = SchedulerConfig(**{**LIMITS, **limits})
        policy = FirstComeFirstServed(QueuePolicyConfig()) if policy is None else policy
        return SchedulerDriver(CheckedScheduler, config, policy=policy, max_in_flight=max_in_flight)

    return make


@pytest.fixture(scope="session")
def make_request() -> MakeRequest:
    """Makes a request; keywords are fields of its `SamplingParams`, or of the request itself."""

    def make(request_id: int, prompt: tuple[int, ...], /, **fields: Any) -> GenerateRequest:
        names = ("cache_salt", "lora", "priority", "tenant", "choice", "retain_s", "cache_key", "retained_prefixes")
        own = {name: fields.pop(name) for name in names if name in fields}
        sampling = SamplingParams(**{"max_tokens": 8, **fields})
        return GenerateRequest(request_id=RequestId(request_id), prompt_token_ids=prompt, sampling=sampling, **own)

    return make
