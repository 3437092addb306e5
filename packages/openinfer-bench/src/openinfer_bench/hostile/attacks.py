"""`ATTACKS`: what an attacker does, how many times at once, what may come of it, and whom it would hurt."""

import asyncio
import json
import random
import time
from collections import defaultdict
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field

from openinfer_bench.hostile import bodies
from openinfer_bench.hostile.connection import Attacker, Connection, Outcome, in_turns, leaving, posting
from openinfer_bench.hostile.framing import (
    forged_turn,
    half_closed,
    idle,
    long_head,
    slow_body,
    slow_head,
    two_lengths,
    unfinished_handshake,
    unread_stream,
)
from openinfer_bench.http_client import Address

HONEST = "honest"
ADMITTED = frozenset({"200", "left"})
_REFUSED = "400 413 429 503 closed"
_ANY = f"200 {_REFUSED}"
_UNANSWERED_PER_S = 100  # attempts of one attacker without an answer: more would be a flood of the network


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """One kind of attack.

    Attributes:
        attacker: makes one attempt over a connection of its own.
        outcomes: what may come of it.
        about: one line.
        concurrency: attempts at a time.
        is_stranger: the attacker has no key.
        on_grammars: victims ask for grammars, new ones; else for plain streams.
        before_tls: the server has a certificate; the attacker ends no handshake.
        kills_guard: the guard process of grammars is killed now and then, as the kernel does where memory is short.
        answers_early: an answer comes before what was asked has been computed, and says nothing of how long that takes.
        least_s: that its arm takes, where what it does adds up.
        flags: further ones of the server.
    """

    attacker: Attacker
    outcomes: frozenset[Outcome]
    about: str
    concurrency: int = 8
    is_stranger: bool = False
    on_grammars: bool = False
    before_tls: bool = False
    kills_guard: bool = False
    answers_early: bool = False
    least_s: float = 0.0
    flags: tuple[str, ...] = ()


def _attack(
    attacker: Attacker,
    outcomes: str,
    about: str,
    concurrency: int = 8,
    *,
    is_stranger: bool = False,
    on_grammars: bool = False,
    before_tls: bool = False,
    kills_guard: bool = False,
    answers_early: bool = False,
    least_s: float = 0.0,
    flags: tuple[str, ...] = (),
) -> Attack:
    return Attack(
        attacker=attacker,
        outcomes=frozenset(outcomes.split()),
        about=about,
        concurrency=concurrency,
        is_stranger=is_stranger,
        on_grammars=on_grammars,
        before_tls=before_tls,
        kills_guard=kills_guard,
        answers_early=answers_early,
        least_s=least_s,
        flags=flags,
    )


_LISTS = b'{"prompt": [' + b"[]," * 2_000_000 + b"[]]}"
_DEAR = bodies.constrained(bodies.dear_masks(), n=16, max_tokens=400, temperature=1.0, stream=True)
_TEXT_8_MB = json.dumps({"prompt": "stone " * 1_390_000}).encode()
_TEXT_1_MB = json.dumps({"prompt": "stone " * 174_000}).encode()
_SHORT = bodies.completion(prompt="stone " * 20, max_tokens=8)
_LONG = bodies.completion(max_tokens=1000, stream=True)

ATTACKS: Mapping[str, Attack] = {
    "idle": _attack(idle, "closed 408 hang", "1,100 silent connections without a key", 1100, is_stranger=True),
    "idle-asyncio": _attack(
        idle,
        "closed 408 hang",
        "the same with asyncio's own event loop, which logs connections that it has no descriptor for",
        1100,
        is_stranger=True,
        flags=("--event-loop", "asyncio"),
    ),
    "unfinished-tls": _attack(
        unfinished_handshake, "closed 408 hang", "handshakes that never end", 400, is_stranger=True, before_tls=True
    ),
    "slow-heads": _attack(slow_head, "408 closed 503", "heads that never end", 400, is_stranger=True),
    "slow-bodies": _attack(slow_body, "408 429 503 closed", "bodies of 8 MB that never end", 400),
    "slow-readers": _attack(unread_stream, "left", "streams that are not read", 60),
    "half-closed": _attack(half_closed, "200 429 503", "connections that are half closed, and want their answers", 50),
    "two-lengths": _attack(two_lengths, "400 closed", "bodies of two lengths"),
    "dear-masks": _attack(posting(_DEAR), _ANY, "12 x n=16 rows of one schema of 237 KB", 12),
    "new-schemas": _attack(
        posting(bodies.new_large_schema), _ANY, "schemas of 240 KB, each a new one", 16, least_s=25.0
    ),
    "queued-schemas": _attack(posting(bodies.new_schema), _ANY, "70 new schemas at a time", 70, on_grammars=True),
    "guard-deaths": _attack(
        posting(bodies.new_regex),
        "200 429 503",
        "good grammars, of which one in two seconds ends the guard: it is killed",
        4,
        on_grammars=True,
        kills_guard=True,
    ),
    "regexes": _attack(
        posting(bodies.exploding_regex),
        "400 429 503",
        "grammars that end the guard, next to good ones",
        on_grammars=True,
    ),
    "tokenize": _attack(posting(_TEXT_8_MB, "/tokenize"), _ANY, "9 texts of 8 MB to tokenize", 9),
    "long-texts": _attack(posting(_TEXT_1_MB, "/tokenize"), _ANY, "9 texts of 1 MB to tokenize", 9),
    "tokenize-left": _attack(
        leaving(_TEXT_1_MB, "/tokenize", after_s=0.5), "left", "the same, by clients that leave", 9
    ),
    "texts": _attack(posting(bodies.text(68_000)), _ANY, "prompts of 68,000 characters", 16),
    "tools": _attack(posting(bodies.many_tools(), "/v1/chat/completions"), _ANY, "a megabyte of tools", 4),
    "control-texts": _attack(
        in_turns(posting(bodies.control_texts, "/v1/chat/completions"), forged_turn),
        _ANY,
        "a megabyte of control tokens in a chat, and fewer that would forge turns",
        4,
    ),
    "turns": _attack(posting(bodies.many_turns, "/v1/chat/completions"), _ANY, "a chat of 2,000 turns", 4),
    # One answer to 256,000 tokens, of which each step computes a few next to others' rows: it may take more than 30 s.
    "id-prompts": _attack(posting(bodies.token_prompts), f"{_ANY} hang", "128 prompts of 2,000 ids in one body", 4),
    "long-prompts": _attack(posting(json.dumps({"prompt": [1] * 1_000_000}).encode()), _REFUSED, "1e6 token ids"),
    # All blocks are for about a dozen of its 256 rows: its requests wait for each other, most for more than 30 s.
    "long-rows": _attack(
        posting(bodies.long_rows), f"{_ANY} hang", "n=16 of 2,000 tokens each: all rows and KV blocks", 16
    ),
    "stored": _attack(posting(bodies.stored_response, "/v1/responses"), _ANY, "responses that are stored", 16),
    "background": _attack(
        posting(bodies.background_response, "/v1/responses"),
        _ANY,
        "responses in the background",
        16,
        answers_early=True,
    ),
    "log-probabilities": _attack(
        posting(bodies.log_probabilities), _ANY, "n=16 with the log-probabilities of 20 tokens each"
    ),
    "flood": _attack(posting(_SHORT), _ANY, "good requests, too many at once", 400),
    "disconnects": _attack(leaving(_LONG), "left closed", "clients that ask and leave", 50),
    "many-choices": _attack(posting(bodies.completion(n=10**9)), "400 429 503", "n = 1e9"),
    "long-heads": _attack(long_head, "431 closed", "heads of 10 MB", is_stranger=True),
    "deep-schemas": _attack(posting(bodies.nested(50_000)), "400 429 503", "a schema 50,000 deep"),
    "empty-lists": _attack(posting(_LISTS), "400 429 503", "2e6 empty lists"),
}
_HONEST = _attack(posting(bodies.completion(max_tokens=24, stream=True, ignore_eos=True)), _ANY, "as its victims")


@dataclass(slots=True)
class Counts:
    """What came of an attack.

    Attributes:
        outcomes: how often each came.
        admitted_s: that requests took in all, from when they were sent: those that were answered with 200, left by
            the client, or under way at the end.
        took_s: the attack.
    """

    outcomes: dict[Outcome, int] = field(default_factory=lambda: defaultdict[Outcome, int](int))
    admitted_s: float = 0.0
    took_s: float = 0.0

    @property
    def admitted(self) -> float:
        """Requests in flight, on average."""
        return self.admitted_s / self.took_s if self.took_s else 0.0


async def run_attack(
    name: str,
    address: Address,
    until: Awaitable[object],
    *,
    key: str = "",
    count: int = 10**9,
    concurrency: int = 0,
) -> Counts:
    """Makes so many attempts at most, so many at once.

    Args:
        name: of `ATTACKS`, or `HONEST`.
        address: of the server.
        until: its end ends the attack; attempts that are under way are given up.
        key: of the attacker's tenant.
        count: attempts at most.
        concurrency: 0 takes the attack's own.
    """
    attack = _HONEST if name == HONEST else ATTACKS[name]
    at_once = concurrency or attack.concurrency
    pause_s = at_once / _UNANSWERED_PER_S
    counts, left, begin_s = Counts(), iter(range(count)), time.monotonic()

    async def work() -> None:
        for _ in left:
            if await _attempt(attack, address, key, counts) != "200":
                await asyncio.sleep(random.uniform(0.5, 1.5) * pause_s)  # noqa: S311 - not all at a time

    attempts = asyncio.gather(*(work() for _ in range(at_once)))
    end = asyncio.ensure_future(until)
    await asyncio.wait((attempts, end), return_when=asyncio.FIRST_COMPLETED)
    for future in (attempts, end):
        future.cancel()
    await asyncio.gather(attempts, end, return_exceptions=True)
    counts.took_s = time.monotonic() - begin_s
    return counts


async def _attempt(attack: Attack, address: Address, key: str, counts: Counts) -> Outcome:
    try:
        reader, writer = await (Address(*address[:2]) if attack.before_tls else address).connect()
    except OSError:
        counts.outcomes["closed"] += 1
        return "closed"
    connection = Connection(reader, writer, key="" if attack.is_stranger else key)
    outcome = ""  # it is under way
    try:
        outcome = await attack.attacker(connection)
        counts.outcomes[outcome] += 1
    finally:
        if connection.posted_s is not None and outcome in {*ADMITTED, ""}:
            counts.admitted_s += time.monotonic() - connection.posted_s
        await connection.close()
    return outcome
