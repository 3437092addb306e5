"""Victims: a tenant's requests one after the other on a few connections, and what they see."""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from openinfer_bench.hostile import bodies
from openinfer_bench.http_client import HANG, LOST, Address, Answer, ask

CLIENTS = 16
TOKENS = 24  # so that 1,000 requests have 20,000 gaps, also where some events hold two tokens
_PROBE_EVERY_S = 0.25
_PROBE = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
_PROBE_DEADLINE_S = 10.0
_NAMES = {LOST: "lost", HANG: "cut"}  # cut: under way when the arm ended


@dataclass(slots=True)
class Seen:
    """What victims saw in one arm.

    Attributes:
        ttft_s: from a request, its connection included, to its first event; to its end where there was none.
        gaps_s: between two events of a stream; to the end of the arm where none came any more.
        statuses: of the answers.
        health_s: that `/health` took at most.
    """

    ttft_s: list[float] = field(default_factory=list[float])
    gaps_s: list[float] = field(default_factory=list[float])
    statuses: Counter[str] = field(default_factory=Counter[str])
    health_s: float = 0.0

    def add(self, answer: Answer) -> None:
        """Takes one answer in; one without an end waited so long for what never came."""
        self.statuses[_NAMES.get(answer.status, str(answer.status))] += 1
        times = [answer.begin_s, *answer.event_s]
        if not answer.is_whole or not answer.event_s:
            times.append(answer.end_s)
        self.ttft_s.append(times[1] - times[0])
        self.gaps_s += [late - early for early, late in itertools.pairwise(times[1:])]


async def ask_all(
    address: Address, key: str, *, requests: int, deadline_s: float, on_grammars: bool, least_s: float = 0.0
) -> Seen:
    """So many requests, as long as there is time for them; those under way at the deadline are taken as they are.

    There are more of them until `least_s` have passed.
    """
    begin_s = time.monotonic()
    seen, num_begun, end_s = Seen(), itertools.count(1), begin_s + deadline_s

    async def client() -> None:
        while next(num_begun) <= requests or time.monotonic() < begin_s + least_s:
            body = bodies.new_regex(TOKENS) if on_grammars else _plain()
            seen.add(await ask(address, "/v1/completions", body, key=key, deadline_s=end_s - time.monotonic()))
            if time.monotonic() >= end_s:
                return

    probing = asyncio.create_task(_keep_probing(address, seen))
    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    probing.cancel()
    await asyncio.gather(probing, return_exceptions=True)
    return seen


def _plain() -> bytes:
    return bodies.completion(max_tokens=TOKENS, stream=True, ignore_eos=True)


async def _keep_probing(address: Address, seen: Seen) -> None:
    while True:
        begin_s = time.monotonic()
        if not await _is_healthy(address):
            seen.health_s = max(seen.health_s, _PROBE_DEADLINE_S)
        seen.health_s = max(seen.health_s, time.monotonic() - begin_s)
        await asyncio.sleep(_PROBE_EVERY_S)


async def _is_healthy(address: Address) -> bool:
    try:
        async with asyncio.timeout(_PROBE_DEADLINE_S):
            reader, writer = await address.connect()
            try:
                writer.write(_PROBE)
                return b" 200 " in await reader.readline()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False


def percentile(values: Sequence[float], share: float) -> float:
    """The value that so large a share of the others does not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
