"""Sessions over replicas that Ray places, routed in several ways: prompt tokens found in caches, and who computed what.

    python tools/ray/sessions.py --json benchmarks/results/ray/sessions.json

Engines of the tiny model on a CPU, real pools, real KV events; requests go from this process, as a server's do. All
ways have the same pools, emptied before each; one engine with the blocks of all is what they are compared with.
"""

import argparse
import asyncio
import itertools
import os
import random
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import msgspec
from recorded import begun, say

from openinfer_bench.sessions.generate import Shape, generate
from openinfer_bench.sessions.session import Session
from openinfer_core import Failed, Finished, GenerateRequest, RequestId, SamplingParams, Scheduled
from openinfer_core.control import FlushCache
from openinfer_core.replicas import PrefixRouter
from openinfer_ray import cluster
from openinfer_ray.bundles import Bundle
from openinfer_ray.kv_events.routing import KvRouting
from openinfer_ray.options import RayOptions
from openinfer_ray.ray_engine import RayEngine, join_replica
from openinfer_ray.replica_spec import ReplicaSpec, Routing
from openinfer_tiny_model import model_dir

TOKEN = secrets.token_hex(32)
APP = "openinfer-sessions"
BLOCKS_PER_SESSION = 40
SHAPE = Shape(sessions=16, turns=6, first_tokens=320, new_tokens=64, output_tokens=16)
OPEN_SESSIONS = 8
VOCABULARY = 250


class Recorded:
    """A router, and which replica each request was sent to; `choose` decides in the router's place."""

    def __init__(self, router: PrefixRouter, choose: Callable[[list[str]], str] | None) -> None:
        self._router = router
        self._choose = choose
        self.sent: dict[int, str] = {}

    @property
    def names(self) -> list[str]:
        return self._router.names

    def add(self, name: str, *, num_blocks: int) -> None:
        self._router.add(name, num_blocks=num_blocks)

    def remove(self, name: str) -> None:
        self._router.remove(name)

    def ended(self, name: str) -> None:
        self._router.ended(name)

    def choose(self, request: GenerateRequest) -> str:
        name = self._router.choose(request) if self._choose is None else self._choose(self.names)
        self.sent[request.request_id] = name
        return name


class Played:
    """Sessions that ask an engine, and what their prompts found."""

    def __init__(self, engine: RayEngine) -> None:
        self._engine = engine
        self._numbers = itertools.count()
        self._ends: dict[int, asyncio.Future[None]] = {}
        self.found = self.asked = 0
        self.computed: dict[int, int] = {}

    async def read(self) -> None:
        async for events in self._engine.events():
            for event in events:
                if isinstance(event, Scheduled):
                    self.found += event.cached_tokens
                    self.computed[event.request_id] -= event.cached_tokens
                elif isinstance(event, Failed):
                    raise RuntimeError(event.message)
                elif isinstance(event, Finished):
                    self._ends[event.request_id].set_result(None)

    async def play(self, session: Session, seed: int, hot_tokens: int, room: asyncio.Semaphore) -> None:
        async with room:
            await self._turns(session, seed, [*range(2, 2 + VOCABULARY), *range(2, 2 + VOCABULARY)][:hot_tokens])

    async def _turns(self, session: Session, seed: int, held: list[int]) -> None:
        chosen = random.Random(seed)
        hot_tokens = len(held)
        for turn in session.turns:
            kept = held[: max(turn.prompt.keep_tokens, hot_tokens)]
            total = turn.prompt.keep_tokens + turn.prompt.new_tokens
            prompt = kept + [2 + chosen.randrange(VOCABULARY) for _ in range(total - len(kept))]
            await self._ask(prompt, turn.output_tokens)
            held = prompt
            for agent in turn.agents:
                await self._turns(agent, seed + 1000, held)

    async def _ask(self, prompt: list[int], output_tokens: int) -> None:
        number = next(self._numbers)
        sampling = SamplingParams(max_tokens=output_tokens, temperature=0.0)
        self.asked += len(prompt)
        self.computed[number] = len(prompt) + output_tokens
        end = self._ends[number] = asyncio.get_running_loop().create_future()
        self._engine.submit(
            GenerateRequest(request_id=RequestId(number), prompt_token_ids=tuple(prompt), sampling=sampling)
        )
        await end


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 4])
    arguments = parser.parse_args()
    seen = begun(shape={name: getattr(SHAPE, name) for name in SHAPE.__slots__}, outcomes=[])
    most = max(arguments.replicas)
    cluster.connect(RayOptions(ray_address="local", replicas=most, ray_app=APP), Bundle(cpus=1, gpus=(0,)))
    try:
        alone = {hot: run_ways(1, hot, ["sent"])[0] for hot in (0, 256)}
        for count, hot in itertools.product(arguments.replicas, alone):
            for outcome in run_ways(count, hot, ["kv-events", "sent", "random", "round robin"]):
                outcome["of_one_pool"] = round(outcome["hit_rate"] / alone[hot]["hit_rate"], 3)
                seen["outcomes"].append(outcome)
                print(outcome, flush=True)
    finally:
        cluster.leave()
    say(seen, arguments.json)


def run_ways(count: int, hot_tokens: int, ways: list[str]) -> list[dict[str, Any]]:
    blocks = SHAPE.sessions * BLOCKS_PER_SESSION // count
    options = RayOptions(ray_address="local", replicas=count, ray_app=APP, replica_timeout_s=60.0)
    spec = ReplicaSpec(
        app=APP,
        family="qwen3",
        model_dir=str(model_dir()),
        options=msgspec.Raw(msgspec.json.encode({"num_blocks": blocks, "max_num_seqs": 16 // count})),
        cpus=1,
        token=TOKEN,
        token_file="",
        drain_deadline_s=30.0,
        max_step_age_s=120.0,
        timeout_s=60.0,
        routing=Routing.KV_EVENTS,
    )
    cluster.start_directory(options)
    cluster.deploy(options, Bundle(cpus=1, gpus=(0,)), spec)
    try:
        return [asyncio.run(run_way(spec, way, count, hot_tokens)) for way in ways]
    finally:
        cluster.delete(APP)


async def run_way(spec: ReplicaSpec, way: str, count: int, hot_tokens: int) -> dict[str, Any]:
    token = TOKEN.encode()
    listing = cluster.listing_of(APP)
    joined = {each.name: join_replica(each, token=token) for each in listing()}
    info = next(iter(joined.values())).info
    chosen, turns = random.Random(7), itertools.count()
    choose = {
        "random": chosen.choice,
        "round robin": lambda names: names[next(turns) % len(names)],
    }.get(way)
    routing: Any = KvRouting(info, key=spec.read_digest_key(token), token=token, patience_s=60.0)
    by_what_was_sent = PrefixRouter(block_size_tokens=info.block_size_tokens, key=token[:32])
    router = Recorded(routing.router if way == "kv-events" else by_what_was_sent, choose)
    routing.router = router
    engine = RayEngine(
        joined, listing=listing, join=lambda each: join_replica(each, token=token), end=lambda: None, routing=routing
    )
    played = Played(engine)
    reading = asyncio.create_task(played.read())
    await engine.control(FlushCache())
    began_s = time.monotonic()
    room = asyncio.Semaphore(OPEN_SESSIONS)
    played_sessions = (
        played.play(session, number, hot_tokens, room) for number, session in enumerate(generate(SHAPE, seed=3))
    )
    await asyncio.gather(*played_sessions)
    took_s = time.monotonic() - began_s
    await engine.close()
    await reading
    computed = dict.fromkeys(joined, 0)
    for number, tokens in played.computed.items():
        computed[router.sent[number]] += tokens
    return {
        "replicas": count,
        "way": way,
        "hot_tokens": hot_tokens,
        "hit_rate": round(played.found / played.asked, 4),
        "busiest_of_mean": round(max(computed.values()) * count / sum(computed.values()), 3),
        "requests": len(played.computed),
        "took_s": round(took_s, 1),
    }


if __name__ == "__main__":
    main()
