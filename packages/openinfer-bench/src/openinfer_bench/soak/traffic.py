"""Requests of a soak: kinds of them in fixed shares, and what may come of each."""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple

from openinfer_bench.http_client import HANG, LOST, Address, Answer, ask

IN_FLIGHT = 96
_WORDS = "stone mountain river bird gold small old went to the and of a king house wood her".split()
_CHOICES = ["red", "green", "blue"]
_PREFIXES = 96  # of 200 words; together more than the KV pool and the tier of host memory hold
_KNOWN_SCHEMAS = 16
_BEFORE_KILL_S = 2.0  # a connection may be accepted by a worker that has just been killed
_OK, _BAD, _BUSY = 200, 400, 503

Sender = Callable[["Traffic"], Awaitable[Answer]]


class Kind(NamedTuple):
    """Requests of one kind.

    Attributes:
        weight: its share.
        send: sends one.
        foreseen: statuses.
    """

    weight: int
    send: Sender
    foreseen: frozenset[int] = frozenset({_OK})


class Strange(NamedTuple):
    """An answer that its kind does not foresee."""

    kind: str
    status: int
    begin_s: float
    end_s: float
    text: str


class Traffic:
    """Requests to one server, drawn from a seed.

    Attributes:
        counts: statuses by kind; `left` where the client did.
        answered: requests that have an answer of any status.
        answered_per_s: of those that `send` sent.
        strange: answers that their kinds do not foresee.
    """

    def __init__(self, address: Address, rng: random.Random, kinds: Mapping[str, int]) -> None:
        self.address = address
        self.rng = rng
        self.counts: dict[str, Counter[str]] = {kind: Counter() for kind in kinds}
        self.answered = 0
        self.answered_per_s = 0.0
        self._weights = kinds
        self.strange: list[Strange] = []

    def text(self, num_words: int) -> str:
        return " ".join(self.rng.choices(_WORDS, k=num_words))

    async def send(self, *, rate: float, seconds: float) -> None:
        """Poisson arrivals; one that finds `IN_FLIGHT` others waits for one of them."""
        before, begin_s = self.answered, time.monotonic()
        next_s = begin_s
        places = asyncio.Semaphore(IN_FLIGHT)
        kinds, weights = [*self._weights], [*self._weights.values()]
        async with asyncio.TaskGroup() as sending:
            while next_s < begin_s + seconds:
                await asyncio.sleep(max(0.0, next_s - time.monotonic()))
                await places.acquire()
                task = sending.create_task(self.one(self.rng.choices(kinds, weights)[0]))
                task.add_done_callback(lambda _: places.release())
                next_s = max(next_s + self.rng.expovariate(rate), time.monotonic() - 1.0)
        self.answered_per_s = (self.answered - before) / (time.monotonic() - begin_s)

    async def one(self, kind: str) -> None:
        """One request, counted."""
        answer = await _KINDS[kind].send(self)
        self.counts[kind]["left" if answer.left else _named(answer.status)] += 1
        self.answered += answer.status > 0
        if answer.status not in _KINDS[kind].foreseen:
            strange = Strange(kind, answer.status, answer.begin_s, answer.end_s, answer.text[:200])
            self.strange.append(strange)

    def unforeseen(self, workers_killed_s: Sequence[float]) -> list[str]:
        """Answers that no kind foresees; lost connections count where no worker was killed meanwhile."""
        return [
            f"{each.kind} {_named(each.status)} {each.text}"
            for each in self.strange
            if each.status != LOST
            or not any(each.begin_s - _BEFORE_KILL_S < at_s < each.end_s for at_s in workers_killed_s)
        ]


async def warm_up(traffic: Traffic) -> None:
    """A few requests of each kind, one after the other."""
    for kind in traffic.counts:
        for _ in range(8):
            await traffic.one(kind)


def _named(status: int) -> str:
    return {LOST: "lost", HANG: "hang"}.get(status, str(status))


async def _plain(traffic: Traffic) -> Answer:
    body = {"prompt": traffic.text(20), "max_tokens": traffic.rng.randint(1, 10), "stream": True, "ignore_eos": True}
    return await ask(traffic.address, "/v1/completions", body)


async def _chat(traffic: Traffic) -> Answer:
    messages = [{"role": "user", "content": traffic.text(30)}]
    return await ask(traffic.address, "/v1/chat/completions", {"messages": messages, "max_tokens": 6, "stream": True})


async def _several(traffic: Traffic) -> Answer:
    body = {"prompt": traffic.text(20), "max_tokens": 4, "n": 4, "temperature": 1.0, "logprobs": 2}
    return await ask(traffic.address, "/v1/completions", body)


async def _prefix(traffic: Traffic) -> Answer:
    known = random.Random(traffic.rng.randrange(_PREFIXES))  # noqa: S311 - the same text for the same number
    prompt = " ".join(known.choices(_WORDS, k=200)) + traffic.text(8)
    return await ask(traffic.address, "/v1/completions", {"prompt": prompt, "max_tokens": 2, "stream": True})


async def _leaves(traffic: Traffic) -> Answer:
    body = {"prompt": traffic.text(20), "max_tokens": 200, "stream": True, "ignore_eos": True}
    return await ask(traffic.address, "/v1/completions", body, leave_after=traffic.rng.randint(1, 5))


async def _choice(traffic: Traffic) -> Answer:
    """The answer is held against the grammar."""
    body = {"prompt": traffic.text(8), "max_tokens": 8, "structured_outputs": {"choice": _CHOICES}, "stream": True}
    answer = await ask(traffic.address, "/v1/completions", body)
    if answer.status == _OK and answer.text not in _CHOICES:
        answer.status = 299
    return answer


def _schema(rng: random.Random) -> dict[str, object]:
    names = ["".join(rng.choices("abcdefgh", k=8)) for _ in range(6)]
    return {"type": "object", "properties": {name: {"type": "integer"} for name in names}, "required": names[:2]}


async def _constrained(traffic: Traffic, schema: dict[str, object]) -> Answer:
    body = {"prompt": traffic.text(8), "max_tokens": 6, "structured_outputs": {"json": schema}, "stream": True}
    return await ask(traffic.address, "/v1/completions", body)


async def _known_schema(traffic: Traffic) -> Answer:
    return await _constrained(traffic, _schema(random.Random(traffic.rng.randrange(_KNOWN_SCHEMAS))))  # noqa: S311


async def _new_schema(traffic: Traffic) -> Answer:
    return await _constrained(traffic, _schema(traffic.rng))


async def _tokenize(traffic: Traffic) -> Answer:
    return await ask(traffic.address, "/tokenize", {"prompt": traffic.text(500)})


async def _stored(traffic: Traffic) -> Answer:
    return await ask(traffic.address, "/v1/responses", {"input": traffic.text(20), "max_output_tokens": 4})


async def _malformed(traffic: Traffic) -> Answer:
    bodies = (b"{", b'{"prompt": 1}', json.dumps({"prompt": "a", "structured_outputs": {"regex": "(" * 9}}).encode())
    return await ask(traffic.address, "/v1/completions", traffic.rng.choice(bodies))


_WITH_GUARD = frozenset({_OK, _BUSY})  # 503 where the guard was killed twice; never 400, which would blame the client
_KINDS: Mapping[str, Kind] = {
    "plain": Kind(30, _plain),
    "chat": Kind(12, _chat),
    "several": Kind(4, _several),
    "prefix": Kind(10, _prefix),
    "leaves": Kind(10, _leaves),
    "choice": Kind(4, _choice, _WITH_GUARD),
    "known-schema": Kind(6, _known_schema, _WITH_GUARD),
    "new-schema": Kind(12, _new_schema, _WITH_GUARD),
    "tokenize": Kind(4, _tokenize),
    "stored": Kind(4, _stored),
    "malformed": Kind(4, _malformed, frozenset({_BAD, _BUSY})),
}
KINDS: Mapping[str, int] = {name: kind.weight for name, kind in _KINDS.items()}
"""Name -> weight."""
