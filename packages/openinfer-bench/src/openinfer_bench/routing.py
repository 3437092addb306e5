"""`openinfer bench routing`: sessions over replicas, routed in several ways, against one pool of all their blocks.

Nothing is computed: each replica is an exact LRU of its blocks. What is counted are prompt tokens that were found, and
the tokens that each replica had to compute, with the answers. Turns are asked of servers in turns, each with a router
of its own: by what it has sent, or by KV events, which arrive some requests late, and of which some are lost and asked
for again.
"""

import argparse
import heapq
import itertools
import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec

from openinfer_bench.sessions.generate import Shape, generate
from openinfer_bench.sessions.session import Grow, Session
from openinfer_core import GenerateRequest, RequestId, SamplingParams
from openinfer_core.provenance import provenance
from openinfer_core.replicas import PrefixRouter
from openinfer_core.replicas.held_prefixes import prefix_digests
from openinfer_ray.kv_events.stream import KvEventStream
from openinfer_ray.kv_events.told_prefixes import ToldPrefixes, block_hash

OPENINFER_CONTRACT = 1

BLOCK_SIZE_TOKENS = 16
_KEY = b"openinfer bench routing"
_SERVICE_S = 1.0  # of a turn: what orders turns of different sessions
_STAGGER_S = 3.0  # between the beginnings of two sessions
_EVENTS_LATE = 2  # requests of a replica whose events have not arrived yet
_LOST_EVERY = 10  # of a replica's messages of events one is lost, and asked for again


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What one way of routing came to."""

    way: str
    replicas: int
    hit_rate: float
    """Prompt tokens that were found, of all."""
    of_one_pool: float
    """The same, of what one pool of as many blocks finds."""
    busiest: float
    """Tokens that the busiest replica computed, of the mean."""
    servers: int = 1


def run(argv: Sequence[str]) -> int:
    """Prints a table; with `--json` also writes it."""
    arguments = _parser().parse_args(argv)
    shape = Shape(sessions=arguments.sessions, turns=12, first_tokens=2_000, new_tokens=600, output_tokens=120)
    found: dict[str, list[Outcome]] = {}
    for hot_tokens in (0, 1_600):
        name = f"hot prefix of {hot_tokens} tokens" if hot_tokens else "no common prefix"
        found[name] = [
            outcome
            for servers in (1, 2)
            for outcome in compare(
                shape, replicas=arguments.replicas, seed=arguments.seed, hot_tokens=hot_tokens, servers=servers
            )
        ]
        print(name)
        for each in found[name]:
            print(
                f"  {each.servers} servers  {each.replicas} replicas  {each.way:12} hit rate {each.hit_rate:.3f}  "
                f"of one pool {each.of_one_pool:.3f}  busiest {each.busiest:.2f} x mean"
            )
    if arguments.json is not None:
        report = {"provenance": provenance(), "shape": vars_of(shape), "seed": arguments.seed, "outcomes": found}
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    return 0


def vars_of(shape: Shape) -> dict[str, float]:
    """A shape for a report."""
    return {name: getattr(shape, name) for name in Shape.__slots__}


def compare(
    shape: Shape,
    *,
    replicas: Sequence[int],
    seed: int,
    hot_tokens: int = 0,
    blocks_per_session: int = 500,
    servers: int = 1,
) -> list[Outcome]:
    """Each way of routing, for each number of replicas; the blocks of all replicas together are always as many.

    Args:
        shape: of the sessions.
        replicas: numbers of them.
        seed: of sessions and of what routes at random.
        hot_tokens: of each first prompt, the same in all sessions.
        blocks_per_session: in all pools together; fewer than sessions need make pools forget.
        servers: that are asked in turns, and know nothing of each other.
    """
    total_blocks = shape.sessions * blocks_per_session
    pool = _Fleet(count=1, num_blocks=total_blocks)
    pool.play(_requests(shape, seed, hot_tokens), lambda request: 0)
    outcomes: list[Outcome] = []
    for count in replicas:
        for way in WAYS:
            fleet = _Fleet(count=count, num_blocks=total_blocks // count)
            asked = itertools.cycle([way.make(fleet, seed) for _ in range(servers)])
            fleet.play(_requests(shape, seed, hot_tokens), lambda request, asked=asked: next(asked)(request))
            busiest = max(fleet.computed) * count / sum(fleet.computed)
            outcomes.append(
                Outcome(
                    way=way.name,
                    replicas=count,
                    hit_rate=fleet.hit_rate,
                    of_one_pool=fleet.hit_rate / pool.hit_rate,
                    busiest=busiest,
                    servers=servers,
                )
            )
    return outcomes


Choose = Callable[[GenerateRequest], int]


@dataclass(slots=True)
class _Pool:
    """An exact LRU of blocks that tells of its changes, as an engine's batches of KV events do."""

    num_blocks: int
    held: OrderedDict[bytes, None] = field(default_factory=OrderedDict[bytes, None])
    batches: list[bytes] = field(default_factory=list[bytes])

    def find(self, digests: Sequence[bytes]) -> int:
        return sum(1 for _ in itertools.takewhile(self.held.__contains__, digests))

    def keep(self, digests: Sequence[bytes]) -> None:
        stored = [digest for digest in digests if digest not in self.held]
        removed: list[bytes] = []
        for digest in reversed(digests):
            self.held[digest] = None
            self.held.move_to_end(digest)
        while len(self.held) > self.num_blocks:
            removed.append(self.held.popitem(last=False)[0])
        events: list[list[object]] = []
        if stored:
            hashes = list(map(block_hash, stored))
            events.append(["BlockStored", hashes, None, [], BLOCK_SIZE_TOKENS, None, "GPU", None, None])
        if removed:
            events.append(["BlockRemoved", list(map(block_hash, removed)), "GPU"])
        self.batches.append(msgspec.msgpack.encode([0.0, events, 0]))


class _Fleet:
    """Pools that requests are played on."""

    def __init__(self, *, count: int, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.pools = [_Pool(num_blocks) for _ in range(count)]
        self.computed = [0] * count
        self._found = self._asked = 0

    @property
    def hit_rate(self) -> float:
        return self._found / self._asked

    def play(self, requests: Iterable[tuple[list[int], list[int]]], choose: Choose) -> None:
        for prompt, whole in requests:
            request = _request(prompt)
            replica = choose(request)
            # As the engine has it, at least one token is computed.
            hit = min(self.pools[replica].find(_digests(request)) * BLOCK_SIZE_TOKENS, len(prompt) - 1)
            self._found, self._asked = self._found + hit, self._asked + len(prompt)
            self.computed[replica] += len(whole) - hit
            self.pools[replica].keep(_digests(_request(whole)))


class _Way(NamedTuple):
    """Makes what chooses for one server."""

    name: str
    make: Callable[[_Fleet, int], Choose]


def _by_what_was_sent(fleet: _Fleet, seed: int) -> Choose:
    router = PrefixRouter(block_size_tokens=BLOCK_SIZE_TOKENS, key=_KEY, seed=seed)
    for name in range(len(fleet.pools)):
        router.add(str(name), num_blocks=fleet.num_blocks)
    return lambda request: int(router.choose(request))


def _by_kv_events(fleet: _Fleet, seed: int) -> Choose:
    held = {str(name): ToldPrefixes(fleet.num_blocks) for name in range(len(fleet.pools))}
    router = PrefixRouter(
        block_size_tokens=BLOCK_SIZE_TOKENS, key=_KEY, seed=seed, digests=_digests, hold=lambda name, _: held[name]
    )
    for name in held:
        router.add(name, num_blocks=fleet.num_blocks)
    hearing = [_Hearing(pool, KvEventStream(held[str(name)])) for name, pool in enumerate(fleet.pools)]

    def choose(request: GenerateRequest) -> int:
        for each in hearing:
            each.hear()
        return int(router.choose(request))

    return choose


@dataclass(slots=True)
class _Hearing:
    """A server's link to one replica's events: late, and some messages are lost."""

    pool: _Pool
    stream: KvEventStream
    num_heard: int = 0

    def hear(self) -> None:
        arrived = len(self.pool.batches) - _EVENTS_LATE
        for sequence in range(self.num_heard, arrived):
            if sequence % _LOST_EVERY == _LOST_EVERY - 1:
                continue
            batch = self.pool.batches[sequence]
            if not self.stream.hear(sequence, batch):
                first = self.stream.next_sequence
                self.stream.replayed(enumerate(self.pool.batches[first : sequence + 1], first))
        self.num_heard = max(self.num_heard, arrived)


def _at_random(fleet: _Fleet, seed: int) -> Choose:
    chosen = random.Random(seed)  # noqa: S311 - a workload, no secret
    return lambda request: chosen.randrange(len(fleet.pools))


def _in_turns(fleet: _Fleet, seed: int) -> Choose:
    del seed
    turns = itertools.cycle(range(len(fleet.pools)))
    return lambda request: next(turns)


WAYS = (
    _Way("kv events", _by_kv_events),
    _Way("prefix", _by_what_was_sent),
    _Way("random", _at_random),
    _Way("round robin", _in_turns),
)


def _digests(request: GenerateRequest) -> list[bytes]:
    return prefix_digests(request, block_size_tokens=BLOCK_SIZE_TOKENS, key=_KEY)


def _request(tokens: list[int]) -> GenerateRequest:
    return GenerateRequest(
        request_id=RequestId(0), prompt_token_ids=tuple(tokens), sampling=SamplingParams(max_tokens=1)
    )


def _requests(shape: Shape, seed: int, hot_tokens: int) -> Iterator[tuple[list[int], list[int]]]:
    """Each turn's prompt, and prompt and answer together, of all sessions in the order in which they come."""
    numbers = itertools.count(hot_tokens)
    hot, ties = list(range(hot_tokens)), itertools.count()
    waiting: list[tuple[float, int, Session, int, list[int]]] = []
    for index, session in enumerate(generate(shape, seed=seed)):
        heapq.heappush(waiting, (index * _STAGGER_S, next(ties), session, 0, hot))
    while waiting:
        now_s, _, session, index, held = heapq.heappop(waiting)
        turn = session.turns[index]
        if not isinstance(turn.prompt, Grow):
            raise TypeError("sessions that are generated grow")
        prompt = held[: max(turn.prompt.keep_tokens, hot_tokens)]
        prompt += itertools.islice(numbers, turn.prompt.keep_tokens + turn.prompt.new_tokens - len(prompt))
        whole = prompt + list(itertools.islice(numbers, turn.output_tokens))
        yield prompt, whole
        ended_s = now_s + _SERVICE_S
        for agent in turn.agents:
            heapq.heappush(waiting, (ended_s, next(ties), agent, 0, whole))
        if index + 1 < len(session.turns):
            wait_s = session.turns[index + 1].wait_s
            heapq.heappush(waiting, (ended_s + wait_s, next(ties), session, index + 1, whole))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="openinfer bench routing", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sessions", type=int, default=60, metavar="N", help="sessions (default: 60)")
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 4], metavar="N", help="(default: 2 4)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the sessions (default: 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the result")
    return parser
