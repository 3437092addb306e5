"""Attacks of `bench hostile` as the scheduler sees them, in virtual time: what another tenant's requests wait for.

Steps take what those of the tiny model took on two cores that others used, by least squares over step traces of `bench
hostile` with `dear-masks` and `long-rows`: 4.3 ms, 0.16 ms for a decode row and 0.77 for a thousand tokens of contexts,
0.31 ms for a prompt token. Victims ask one request of
24 tokens after the other, as many at a time as the bench has (16), or twice as many; the attack begins a second after
them, and is compared with an honest tenant with as many requests as the bench found admitted. No clock, no thread: a
run is the same on any machine.

    python test_attacks_in_virtual_time.py [--json FILE] [--seconds S]        # the table
"""

import argparse
import heapq
import json
import random
import sys
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from openinfer_core import GenerateRequest, RequestId, SamplingParams
from openinfer_core.events import Failed, Finished, Tokens
from openinfer_core.queue_policies import FairShare
from openinfer_core.scheduling import QueuePolicyConfig, SchedulerConfig, StepPlan
from openinfer_core.testing.fake_device import FakeDevice
from openinfer_engine.scheduler import TokenBudgetScheduler

BASE_S, ROW_S, TOKEN_S, READ_S = 4.3e-3, 0.16e-3, 0.31e-3, 0.77e-6
TOKENS = 24
ATTACK_S, SEEN_S, END_S = 1.0, 3.0, 8.0
LONG_S = 30.0  # rows have grown until the attacker's next ones find no room
THINK_S = 0.004
RATIO, MORE_MS = 2.0, 20.0  # the bound of `bench hostile`


@dataclass(frozen=True)
class Asked:
    """What one tenant asks: so many requests at a time, each of some choices or prompts."""

    requests: int
    choices: int = 1
    prompt_tokens: int = 3
    max_tokens: int = TOKENS


# What is asked, and how many requests an honest tenant has in its place.
ATTACKS = {
    "id-prompts": (Asked(4, choices=128, prompt_tokens=2000, max_tokens=1), 4),
    "dear-masks": (Asked(12, choices=16, prompt_tokens=20, max_tokens=400), 12),
    "slow-readers": (Asked(60, max_tokens=1000), 60),
    "background": (Asked(64, prompt_tokens=14, max_tokens=17), 4),  # as the model answers what is asked there
    "long-rows": (Asked(16, choices=16, prompt_tokens=1000, max_tokens=1000), 16),
    "texts": (Asked(4, prompt_tokens=2000), 1),
}


@dataclass
class Seen:
    """Of victims, in milliseconds; what comes before `SEEN_S` is not counted."""

    ttft_ms: list[float] = field(default_factory=list)
    gaps_ms: list[float] = field(default_factory=list)

    def p99(self) -> tuple[float, float]:
        return percentile(self.ttft_ms, 0.99), percentile(self.gaps_ms, 0.99)


class World:
    """One scheduler, whose next step is planned while one runs, as `StepLoop` has it."""

    def __init__(self, attack: Asked, num_victims: int, *, end_s: float = END_S) -> None:
        config = SchedulerConfig(
            num_blocks=1024, block_size_tokens=16, max_num_seqs=256, max_step_tokens=4096, max_model_tokens=2048
        )
        self.scheduler = TokenBudgetScheduler(config, FairShare(QueuePolicyConfig()))
        self._device = FakeDevice(config)
        self._attack, self._end_s = attack, end_s
        self._draw = random.Random(1)
        self._now_s = self._device_free_s = 0.0
        self._asked_s: dict[RequestId, float] = {}  # of victims' requests: since when the next token is waited for
        self._begun: set[RequestId] = set()
        self._request_of: dict[RequestId, int] = {}  # of the attacker's choices
        self._left = Counter[int]()
        self._num_ids = self._num_requests = 0
        self._coming = [(self._draw.uniform(0, 0.05), number) for number in range(num_victims)]
        heapq.heapify(self._coming)
        self.seen = Seen()

    def run(self) -> Seen:
        in_flight = deque[tuple[StepPlan, float]]()
        is_attacked = False
        while self._now_s < self._end_s:
            while self._coming and self._coming[0][0] <= self._now_s:
                since_s, _ = heapq.heappop(self._coming)
                self._asked_s[self._add("victim", Asked(1))] = since_s
            if not is_attacked and self._now_s >= ATTACK_S:
                is_attacked = True
                for _ in range(self._attack.requests):
                    self._ask()
            while len(in_flight) < 2 and (plan := self.scheduler.plan(now_s=self._now_s)) is not None:
                in_flight.append((plan, self._launch(plan)))
            if not in_flight:
                self._now_s = self._coming[0][0]
                continue
            plan, ends_s = in_flight.popleft()
            self._now_s = max(self._now_s, ends_s)
            self._apply(plan)
        return self.seen

    def _launch(self, plan: StepPlan) -> float:
        prompt_tokens = int(plan.num_host_tokens.sum())
        decode_rows = plan.num_rows - int((plan.num_host_tokens > 0).sum())
        begin_s = max(self._now_s, self._device_free_s)
        context_tokens = int(plan.starts[plan.num_host_tokens == 0].sum())
        rows_s = ROW_S * decode_rows + READ_S * context_tokens
        self._device_free_s = begin_s + BASE_S + rows_s + TOKEN_S * prompt_tokens
        return self._device_free_s

    def _apply(self, plan: StepPlan) -> None:
        for event in self.scheduler.apply(plan, self._device.run(plan), now_s=self._now_s):
            request_id = event.request_id
            assert not isinstance(event, Failed), event
            if isinstance(event, Tokens) and request_id in self._asked_s:
                waited_ms = (self._now_s - self._asked_s[request_id]) * 1e3
                self._asked_s[request_id] = self._now_s
                if self._now_s > SEEN_S:
                    (self.seen.gaps_ms if request_id in self._begun else self.seen.ttft_ms).append(waited_ms)
                self._begun.add(request_id)
            elif isinstance(event, Finished) and self._asked_s.pop(request_id, None) is not None:
                thinks_s = THINK_S * self._draw.uniform(1.0, 1.5)
                heapq.heappush(self._coming, (self._now_s + thinks_s, request_id))
            elif isinstance(event, Finished):
                self._end_of_choice(self._request_of.pop(request_id))

    def _end_of_choice(self, request: int) -> None:
        self._left[request] -= 1
        if not self._left[request]:
            self._ask()

    def _ask(self) -> None:
        """One request more of the attacker."""
        request, self._num_requests = self._num_requests, self._num_requests + 1
        for _ in range(self._attack.choices):
            self._request_of[self._add("attacker", self._attack)] = request
        self._left[request] = self._attack.choices

    def _add(self, tenant: str, asked: Asked) -> RequestId:
        request_id, self._num_ids = RequestId(self._num_ids), self._num_ids + 1
        prompt = tuple(self._draw.randrange(1, 200) for _ in range(asked.prompt_tokens))
        sampling = SamplingParams(max_tokens=asked.max_tokens)
        request = GenerateRequest(request_id=request_id, prompt_token_ids=prompt, sampling=sampling, tenant=tenant)
        assert self.scheduler.add(request, now_s=self._now_s) == []
        return request_id


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def bound(honest_ms: float) -> float:
    return max(RATIO * honest_ms, honest_ms + MORE_MS)


@pytest.mark.parametrize(
    ("attack", "num_victims", "end_s"),
    [
        ("dear-masks", 16, END_S),
        ("slow-readers", 16, END_S),
        ("background", 16, END_S),
        ("long-rows", 16, LONG_S),
        ("id-prompts", 32, END_S),
    ],
)
def test_victims_of_an_attack_are_within_the_bound_next_to_an_honest_tenant(
    attack: str, num_victims: int, end_s: float
) -> None:
    asked, num_honest = ATTACKS[attack]
    honest_ttft_ms, honest_gap_ms = World(Asked(num_honest), num_victims).run().p99()
    seen = World(asked, num_victims, end_s=end_s).run()
    ttft_ms, gap_ms = seen.p99()
    assert ttft_ms <= bound(honest_ttft_ms)
    assert gap_ms <= bound(honest_gap_ms)
    assert len(seen.ttft_ms) > 100


def row_of(attack: str, num_victims: int, end_s: float) -> dict[str, object]:
    asked, num_honest = ATTACKS[attack]
    row: dict[str, object] = {"attack": attack, "victims": num_victims, "seconds": end_s}
    for name, of_other in (("honest", Asked(num_honest)), ("attack", asked)):
        seen = World(of_other, num_victims, end_s=end_s).run()
        for what, values in (("ttft", seen.ttft_ms), ("itl", seen.gaps_ms)):
            row |= {f"{name}_{what}_p{q}_ms": round(percentile(values, q / 100), 1) for q in (50, 99)}
            row[f"{name}_{what}_longest_ms"] = round(max(values), 1)
        row[f"{name}_requests"] = len(seen.ttft_ms)
    return row


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=END_S, help="virtual ones of each run")
    arguments = parser.parse_args(argv)
    rows = [row_of(attack, num_victims, arguments.seconds) for num_victims in (16, 32) for attack in ATTACKS]
    for row in rows:
        sys.stdout.write(json.dumps(row) + "\n")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
