"""Conformance of a `Scheduler` where the queue policy chooses who gives way: `ChoosesVictim`.

A scheduler that asks no policy for victims passes, too.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

import msgspec

from openinfer_core.queue_policies import FirstComeFirstServed
from openinfer_core.request import GenerateRequest, RequestId
from openinfer_core.scheduling import QueuePolicyConfig
from openinfer_core.testing.errors import require
from openinfer_core.testing.scheduler_driver import SchedulerDriver, SchedulerFactory
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

_Policies: TypeAlias = "Iterator[tuple[RandomVictims, int]]"


class RandomVictims(FirstComeFirstServed):
    """Chooses victims at random, and notes whether the oldest that runs is ever among the candidates."""

    def __init__(self, seed: int) -> None:
        super().__init__(QueuePolicyConfig())
        self.driver: SchedulerDriver | None = None
        self.num_asked = 0
        self.offered_oldest: list[RequestId] = []
        self._rng = random.Random(seed)  # noqa: S311 - no secrets here
        self._admitted: list[RequestId] = []

    def admitted(self, request: GenerateRequest) -> None:
        self._admitted.append(request.request_id)

    def victim(self, candidates: Sequence[GenerateRequest]) -> int:
        self.num_asked += 1
        ids = [request.request_id for request in candidates]
        running = set[RequestId]() if self.driver is None else self.driver.running_ids
        oldest = next((request_id for request_id in self._admitted if request_id in running), None)
        self.offered_oldest += [request_id for request_id in ids if request_id == oldest]
        return self._rng.randrange(len(candidates))


class FaultyVictims(RandomVictims):
    """Raises, or answers what is no index of a candidate, most of the time."""

    def victim(self, candidates: Sequence[GenerateRequest]) -> int:
        chosen = super().victim(candidates)
        match self.num_asked % 4:
            case 0:
                raise ValueError("no victim")
            case 1:
                return len(candidates)
            case 2:
                return -1
            case _:
                return chosen


def check_chosen_victims(factory: SchedulerFactory, *, seeds: Iterable[int] = range(8)) -> None:
    """Whichever gives way, all are served exactly, and the oldest that runs is never a candidate."""
    for policy, max_in_flight in _policies(RandomVictims):
        _check_pressure(factory, policy, max_in_flight)
    for seed in seeds:
        rng, policy = random.Random(seed), RandomVictims(seed)  # noqa: S311 - no secrets here
        config = random_config(rng)
        if seed % 2:  # a model with recurrent states
            config = msgspec.structs.replace(config, prefix_cache=False, num_snapshots=3)
        driver = policy.driver = SchedulerDriver(factory, config, policy=policy, max_in_flight=1 + seed // 2 % 2)
        drive_at_random(driver, rng)
        _check_oldest(policy)
        check_serves_on(driver)


def check_faulty_victims(factory: SchedulerFactory) -> None:
    """A policy that raises when it is asked for a victim, or names none of the candidates, harms no request."""
    for policy, max_in_flight in _policies(FaultyVictims):
        _check_pressure(factory, policy, max_in_flight)


def _policies(kind: type[RandomVictims]) -> _Policies:
    for max_in_flight in (1, 2):
        for seed in range(4):
            yield kind(seed), max_in_flight


def _check_pressure(factory: SchedulerFactory, policy: RandomVictims, max_in_flight: int) -> None:
    config = make_config(num_blocks=14, block_size_tokens=2, max_num_seqs=6, max_step_tokens=8, max_model_tokens=24)
    driver = policy.driver = SchedulerDriver(factory, config, policy=policy, max_in_flight=max_in_flight)
    # Some prompts take several steps, and some wait for their last token: these are candidates without a row.
    requests = [
        make_request(
            index,
            prompt=(index,) * (9 if index % 4 == 3 else 2),
            max_tokens=14,
            grammar=GRAMMAR if index % 3 == 2 else None,
        )
        for index in range(14)
    ]
    for request in requests:
        submit_served(driver, request)
    driver.run()
    check_served_in_full(driver, requests)
    _check_oldest(policy)
    check_serves_on(driver)


def _check_oldest(policy: RandomVictims) -> None:
    offered = policy.offered_oldest
    require(not offered, f"requests {offered} were candidates for a victim while they were the oldest that ran")
