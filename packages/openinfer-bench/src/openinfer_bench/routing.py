"""`openinfer bench routing`: sessions over replicas, routed in several ways, against one pool of all their blocks.

Nothing is computed: each replica is an exact LRU of its blocks. What is counted are prompt tokens that were found, and
the tokens that each replica had to compute, with the answers.
"""

import argparse
import heapq
import itertools
import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from openinfer_bench.sessions.generate import Shape, generate
from openinfer_bench.sessions.session import Grow, Session
from openinfer_core import GenerateRequest, RequestId, SamplingParams
from openinfer_core.provenance import provenance
from openinfer_core.replicas import PrefixRouter
from openinfer_core.replicas.held_prefixes import prefix_digests

OPENINFER_CONTRACT = 1

BLOCK_SIZE_TOKENS = 16
_KEY = b"openinfer bench routing"
_SERVICE_S = 1.0  # of a turn: what orders turns of different sessions
_STAGGER_S = 3.0  # between the beginnings of two sessions


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


def run(argv: Sequence[str]) -> int:
    """Prints a table; with `--json` also writes it."""
    arguments = _parser().parse_args(argv)
    shape = Shape(sessions=arguments.sessions, turns=12, first_tokens=2_000, new_tokens=600, output_tokens=120)
    found: dict[str, list[Outcome]] = {}
    for hot_tokens in (0, 1_600):
        name = f"hot prefix of {hot_tokens} tokens" if hot_tokens else "no common prefix"
        found[name] = compare(shape, replicas=arguments.replicas, seed=arguments.seed, hot_tokens=hot_tokens)
        print(name)
        for each in found[name]:
            print(
                f"  {each.replicas} replicas  {each.way:12} hit rate {each.hit_rate:.3f}  of one pool "
                f"{each.of_one_pool:.3f}  busiest {each.busiest:.2f} x mean"
            )
    if arguments.json is not None:
        report = {"provenance": provenance(), "shape": vars_of(shape), "seed": arguments.seed, "outcomes": found}
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    return 0


def vars_of(shape: Shape) -> dict[str, float]:
    """A shape for a report."""
    return {name: getattr(shape, name) for name in Shape.__slots__}


def compare(
    shape: Shape, *, replicas: Sequence[int], seed: int, hot_tokens: int = 0, blocks_per_session: int = 500
) -> list[Outcome]:
    """Each way of routing, for each number of replicas; the blocks of all replicas together are always as many.

    Args:
        shape: of the sessions.
        replicas: numbers of them.
        seed: of sessions and of what routes at random.
        hot_tokens: of each first prompt, the same in all sessions.
        blocks_per_session: in all pools together; fewer than sessions need make pools forget.
    """
    total_blocks = shape.sessions * blocks_per_session
    requests = _requests(shape, seed, hot_tokens)
    pool, _ = _play(requests, lambda request: 0, count=1, num_blocks=total_blocks)
    outcomes: list[Outcome] = []
    for count in replicas:
        for way, choose in _ways(count, total_blocks // count, seed):
            requests = _requests(shape, seed, hot_tokens)
            hit_rate, computed = _play(requests, choose, count=count, num_blocks=total_blocks // count)
            busiest = max(computed) * count / sum(computed)
            outcomes.append(
                Outcome(way=way, replicas=count, hit_rate=hit_rate, of_one_pool=hit_rate / pool, busiest=busiest)
            )
    return outcomes


Choose = Callable[[GenerateRequest], int]


def _ways(count: int, num_blocks: int, seed: int) -> Iterator[tuple[str, Choose]]:
    router = PrefixRouter(block_size_tokens=BLOCK_SIZE_TOKENS, key=_KEY, seed=seed)
    for name in range(count):
        router.add(str(name), num_blocks=num_blocks)
    yield "prefix", lambda request: int(router.choose(request))
    chosen = random.Random(seed)  # noqa: S311 - a workload, no secret
    yield "random", lambda request: chosen.randrange(count)
    turns = itertools.cycle(range(count))
    yield "round robin", lambda request: next(turns)


@dataclass(slots=True)
class _Pool:
    """An exact LRU of blocks."""

    num_blocks: int
    held: OrderedDict[bytes, None] = field(default_factory=OrderedDict[bytes, None])

    def find(self, digests: Sequence[bytes]) -> int:
        return sum(1 for _ in itertools.takewhile(self.held.__contains__, digests))

    def keep(self, digests: Sequence[bytes]) -> None:
        for digest in reversed(digests):
            self.held[digest] = None
            self.held.move_to_end(digest)
        while len(self.held) > self.num_blocks:
            self.held.popitem(last=False)


def _play(
    requests: Iterable[tuple[list[int], list[int]]], choose: Choose, *, count: int, num_blocks: int
) -> tuple[float, list[int]]:
    pools = [_Pool(num_blocks) for _ in range(count)]
    found, asked, computed = 0, 0, [0] * count
    for prompt, whole in requests:
        request = _request(prompt)
        digests = prefix_digests(request, block_size_tokens=BLOCK_SIZE_TOKENS, key=_KEY)
        replica = choose(request)
        # As the engine has it, at least one token is computed.
        hit = min(pools[replica].find(digests) * BLOCK_SIZE_TOKENS, len(prompt) - 1)
        found, asked = found + hit, asked + len(prompt)
        computed[replica] += len(whole) - hit
        pools[replica].keep(prefix_digests(_request(whole), block_size_tokens=BLOCK_SIZE_TOKENS, key=_KEY))
    return found / asked, computed


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
