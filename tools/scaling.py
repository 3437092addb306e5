"""What more GPUs cost a host, part by part: plan frames, router, the hop to a replica, events, and simulated replicas.

Run in an environment of all packages:

    python tools/scaling.py --json benchmarks/results/scaling/parts.json

Each part is the product's own code, timed on this machine in processor time (the hop in wall time). Replicas are
simulated engines whose steps take what a GPU's were measured to take; their clock is virtual, so that 64 of them run
on two cores, and throughput and waiting do not depend on this machine. docs/scaling.md has what follows from it.
"""

import argparse
import asyncio
import heapq
import json
import os
import random
import socket
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from openinfer_core import (
    EngineHandle,
    Failed,
    Finished,
    GenerateRequest,
    RequestId,
    SamplingParams,
    TokenEvent,
    Tokens,
)
from openinfer_core.process.engine_process import LinkKind
from openinfer_core.process.remote import RemoteEngine, open_link
from openinfer_core.process.wire import Events, encode_frame, to_client_decoder
from openinfer_core.provenance import provenance
from openinfer_core.replicas import PrefixRouter
from openinfer_core.scheduling import StepPlan
from openinfer_core.simulated import SimulatedLoop, SimulatedOptions, spawn_simulated
from openinfer_engine.kv_events.schema import BlockStored, KvEventBatch
from openinfer_engine.worker.messages import RunStep
from openinfer_ray.kv_events.stream import KvEventStream
from openinfer_ray.kv_events.told_prefixes import ToldPrefixes
from openinfer_ray.ray_engine import RayEngine, join_replica
from openinfer_ray.relay import Relay
from openinfer_ray.replica_spec import ReplicaAddress

GPUS = (1, 2, 8, 64)
BLOCK_TOKENS = 16
ROWS = 64  # of each replica at a time
TPOT_S = 0.0054  # Qwen3-4B in BF16, 64 rows of 1,024 tokens, one H200: benchmarks/README.md
OUTPUT_TOKENS = 128
SESSIONS_PER_REPLICA = 96  # more than it has rows: some wait
TURNS = 6
FIRST_TOKENS, NEW_TOKENS = 1_024, 256
KEY = b"scaling, no secret"
REPEATS = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--gpus", type=int, nargs="+", default=GPUS)
    arguments = parser.parse_args()
    report: dict[str, Any] = {"provenance": json.loads(json.dumps(provenance(), default=vars_of))}
    report["load_average"] = round(os.getloadavg()[0], 2)
    report["plan_frames"] = [plan_frame(rows, prompt) for rows, prompt in ((1, 0), (64, 0), (256, 0), (256, 8_192))]
    report["event_frames"] = [event_frame(rows) for rows in (1, 64, 256)]
    report["kv_events"] = kv_events()
    report["router"] = [route(replicas, tokens) for replicas in arguments.gpus for tokens in (1_024, 8_192, 65_536)]
    report["hop"] = asyncio.run(hop())
    report["reading"] = asyncio.run(reading())
    report["replicas"] = [replicas_of(count) for count in arguments.gpus]
    one = report["replicas"][0]["tokens_per_s"] / report["replicas"][0]["replicas"]
    for each in report["replicas"]:
        each["of_linear"] = round(each["tokens_per_s"] / each["replicas"] / one, 3)
    print(json.dumps({name: part for name, part in report.items() if name != "provenance"}, indent=1))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def vars_of(value: Any) -> Any:
    return {name: getattr(value, name) for name in value.__struct_fields__}


def processor_us(work: Callable[[], object], repeats: int = REPEATS) -> float:
    """Microseconds of processor, the median of nine runs of `repeats`."""
    runs = []
    for _ in range(9):
        began_s = time.process_time()
        for _ in range(repeats):
            work()
        runs.append((time.process_time() - began_s) / repeats)
    return round(statistics.median(runs) * 1e6, 2)


def plan_frame(rows: int, prompt_tokens: int) -> dict[str, float]:
    """One step's frame to one rank: decode rows, and the first chunk of a prompt."""
    chunk = int(prompt_tokens > 0)
    ids = np.arange(prompt_tokens, dtype=np.int32)
    counts = np.array([1] * rows + [prompt_tokens] * chunk, np.int32)
    new_blocks = np.array(
        [int(row % BLOCK_TOKENS == 0) for row in range(rows)] + [prompt_tokens // BLOCK_TOKENS] * chunk
    )
    plan = StepPlan(
        step=1_000_000,
        slots=np.arange(rows + chunk, dtype=np.int32),
        starts=np.array([1_024] * rows + [0] * chunk, np.int32),
        counts=counts,
        num_host_tokens=np.array([0] * rows + [prompt_tokens] * chunk, np.int32),
        max_new=np.ones(rows + chunk, np.int32),
        token_ids=ids,
        new_block_counts=new_blocks.astype(np.int32)[None],
        new_blocks=np.arange(int(new_blocks.sum()), dtype=np.int32) + 100_000,
    )
    frame = bytes(encode_frame(RunStep.of(plan)))
    return {
        "rows": rows,
        "prompt_tokens": prompt_tokens,
        "bytes": len(frame),
        "encode_us": processor_us(lambda: encode_frame(RunStep.of(plan))),
    }


def event_frame(rows: int) -> dict[str, float]:
    """One step's tokens, from a replica to its server."""
    events = [Tokens(RequestId(10_000 + row), (100_000 + row,)) for row in range(rows)]
    frame = bytes(encode_frame(Events(events)))
    return {
        "rows": rows,
        "bytes": len(frame),
        "bytes_per_token": round(len(frame) / rows, 2),
        "encode_us_per_token": round(processor_us(lambda: encode_frame(Events(events))) / rows, 3),
        "decode_us_per_token": round(processor_us(lambda: to_client_decoder.decode(frame[4:])) / rows, 3),
    }


def kv_events() -> dict[str, float]:
    """What `--kv-events` publishes of one sealed block, and what a router's server takes to hear of it.

    Two more bounds are a block's removal, which names it alone. Sockets and their encryption are not in these times.
    """
    chosen = random.Random(0)

    def batch_of(blocks: int) -> bytes:
        stored = [
            BlockStored(
                [chosen.getrandbits(64)], chosen.getrandbits(64), [100_000 + each for each in range(BLOCK_TOKENS)],
                BLOCK_TOKENS, None, "GPU", None, None,
            )
            for _ in range(blocks)
        ]  # fmt: skip
        return msgspec.msgpack.encode(KvEventBatch(time.time(), stored))

    def hearing_us(blocks: int) -> float:
        batches, stream = [batch_of(blocks) for _ in range(REPEATS + 1)], KvEventStream(ToldPrefixes(1 << 18))
        sequence = iter(range(10**9))

        def hear() -> None:
            number = next(sequence)
            stream.hear(number, batches[number % len(batches)])

        return processor_us(hear) / blocks

    return {
        "bytes_of_a_batch_of_one": len(batch_of(1)),
        "bytes_per_block": round(len(batch_of(64)) / 64, 1),
        "hearing_us_of_a_batch_of_one": round(hearing_us(1), 2),
        "hearing_us_per_block": round(hearing_us(64), 2),
    }


def route(replicas: int, tokens: int) -> dict[str, float]:
    """One request through the router, prompt digested."""
    router = PrefixRouter(block_size_tokens=BLOCK_TOKENS, key=KEY)
    for name in range(replicas):
        router.add(str(name), num_blocks=20_000)
    prompts = [request(number, range(number, number + tokens)) for number in range(8)]
    turn = iter(range(10**9))
    repeats = max(2, 40_000 // tokens)
    us = processor_us(lambda: router.choose(prompts[next(turn) % len(prompts)]), repeats)
    return {"replicas": replicas, "prompt_tokens": tokens, "choose_us": us}


def request(number: int, prompt: Any, max_tokens: int = OUTPUT_TOKENS) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=max_tokens, seed=number)
    return GenerateRequest(request_id=RequestId(number), prompt_token_ids=tuple(prompt), sampling=sampling)


async def hop(rounds: int = 2_000) -> dict[str, float]:
    """A question to an engine's process and its answer: directly, and through a replica's relay over loopback."""
    engine = spawn_simulated(SimulatedOptions(), link=LinkKind.UNIX)
    access = engine.access
    assert access is not None
    relay = Relay(socket.create_server(("127.0.0.1", 0)), token=KEY, open_link=lambda: open_link(access))
    relay.start()
    host, port = relay.address
    joined = join_replica(ReplicaAddress(name="r", host=host, port=port), token=KEY)
    direct_us, relayed_us = [], []
    for _ in range(rounds):  # interleaved
        direct_us.append(await asked_us(engine))
        relayed_us.append(await asked_us(joined))
    await joined.close()
    relay.close()
    await engine.close()
    return {
        "rounds": rounds,
        "direct_p50_us": round(statistics.median(direct_us), 1),
        "relayed_p50_us": round(statistics.median(relayed_us), 1),
        "direct_p99_us": round(sorted(direct_us)[rounds * 99 // 100], 1),
        "relayed_p99_us": round(sorted(relayed_us)[rounds * 99 // 100], 1),
    }


async def reading() -> dict[str, float]:
    """Tokens of 64 paced streams, read in this process: of the engine's own socket, and of a server's replica."""
    options = SimulatedOptions(rows_per_step=ROWS, tpot_s=TPOT_S)
    engine = spawn_simulated(options, link=LinkKind.UNIX)
    access = engine.access
    assert access is not None
    relay = Relay(socket.create_server(("127.0.0.1", 0)), token=KEY, open_link=lambda: open_link(access))
    relay.start()
    host, port = relay.address
    joined = join_replica(ReplicaAddress(name="r", host=host, port=port), token=KEY)
    routed = RayEngine({"r": joined}, listing=list, join=lambda _: joined, end=lambda: None)
    direct_us = await read_us(engine)
    routed_us = await read_us(routed)
    await routed.close()
    relay.close()
    await engine.close()
    return {"direct_us_per_token": direct_us, "routed_and_relayed_us_per_token": routed_us}


async def read_us(engine: EngineHandle, tokens_each: int = 400) -> float:
    """Microseconds of processor per token of 64 requests that run together; the engine is another process."""
    for number in range(ROWS):
        engine.submit(request(number, range(16), tokens_each))
    began_s, ended = time.process_time(), 0
    async for events in engine.events():
        ended += sum(isinstance(event, Finished) for event in events)
        if ended == ROWS:
            break
    return round((time.process_time() - began_s) / (ROWS * tokens_each) * 1e6, 2)


async def asked_us(engine: RemoteEngine) -> float:
    began_s = time.perf_counter()
    await engine.stats()
    return (time.perf_counter() - began_s) * 1e6


def replicas_of(count: int) -> dict[str, float]:
    """Sessions over so many simulated replicas, in virtual time: each asks its next turn when the last is answered."""
    fleet = Fleet(count)
    while fleet.is_busy:
        fleet.ask_what_is_due()
        fleet.step()
    return fleet.report()


class Fleet:
    """Simulated replicas that step together, a router, and sessions."""

    def __init__(self, count: int) -> None:
        self.now_s = 0.0
        options = SimulatedOptions(rows_per_step=ROWS, tpot_s=TPOT_S, num_token_ids=100_000)
        self.loops = [SimulatedLoop(options, clock=lambda: self.now_s, sleep=lambda _: None) for _ in range(count)]
        self.router = PrefixRouter(block_size_tokens=BLOCK_TOKENS, key=KEY)
        session_blocks = (FIRST_TOKENS + TURNS * (NEW_TOKENS + OUTPUT_TOKENS)) // BLOCK_TOKENS
        for name in range(count):
            self.router.add(str(name), num_blocks=SESSIONS_PER_REPLICA * session_blocks)
        self.chosen = random.Random(count)
        self.sessions = [Session(number, self.chosen) for number in range(count * SESSIONS_PER_REPLICA)]
        self.due = [(self.chosen.uniform(0, OUTPUT_TOKENS * TPOT_S), session.number) for session in self.sessions]
        heapq.heapify(self.due)
        self.asked_s: dict[int, float] = {}
        self.waits_s: list[float] = []
        self.tokens = [0] * count
        self.later_turns = self.stayed = 0
        self.router_s = 0.0

    @property
    def is_busy(self) -> bool:
        return bool(self.due) or any(loop.busy for loop in self.loops)

    def ask_what_is_due(self) -> None:
        while self.due and self.due[0][0] <= self.now_s:
            session = self.sessions[heapq.heappop(self.due)[1]]
            asking = session.next_request()
            began_s = time.process_time()
            replica = int(self.router.choose(asking))
            self.router_s += time.process_time() - began_s
            self.later_turns += session.replica is not None
            self.stayed += session.replica == replica
            session.replica = replica
            self.asked_s[asking.request_id] = self.now_s
            self.loops[replica].submit(asking)

    def step(self) -> None:
        self.now_s += TPOT_S
        for replica, loop in enumerate(self.loops):
            for event in loop.step():
                self._hear(replica, event)

    def _hear(self, replica: int, event: TokenEvent) -> None:
        if isinstance(event, Tokens):
            self.tokens[replica] += len(event.token_ids)
            if (asked_s := self.asked_s.pop(event.request_id, None)) is not None:
                self.waits_s.append(self.now_s - asked_s)
        elif isinstance(event, Failed):
            raise RuntimeError(event.message)
        elif isinstance(event, Finished):
            session = self.sessions[event.request_id // TURNS]
            if session.turn < TURNS:
                heapq.heappush(self.due, (self.now_s + self.chosen.uniform(0, 0.5), session.number))

    def report(self) -> dict[str, float]:
        waits_s, total = sorted(self.waits_s), sum(self.tokens)
        return {
            "replicas": len(self.loops),
            "requests": len(waits_s),
            "virtual_s": round(self.now_s, 2),
            "tokens_per_s": round(total / self.now_s, 1),
            "busiest_of_mean": round(max(self.tokens) * len(self.loops) / total, 3),
            "later_turns_at_the_same_replica": round(self.stayed / self.later_turns, 3),
            "first_token_p50_ms": round(waits_s[len(waits_s) // 2] * 1e3, 1),
            "first_token_p99_ms": round(waits_s[len(waits_s) * 99 // 100] * 1e3, 1),
            "router_us_per_request": round(self.router_s / len(waits_s) * 1e6, 1),
        }


class Session:
    """Turns that each repeat what was said before."""

    def __init__(self, number: int, chosen: random.Random) -> None:
        self.number = number
        self.turn = 0
        self.replica: int | None = None  # of the last turn
        self._said = [chosen.randrange(256) for _ in range(FIRST_TOKENS)]
        self._seed = chosen.randrange(1 << 30)

    def next_request(self) -> GenerateRequest:
        asking = request(self.number * TURNS + self.turn, self._said)
        chosen = random.Random(self._seed + self.turn)
        self._said += [chosen.randrange(256) for _ in range(NEW_TOKENS + OUTPUT_TOKENS)]
        self.turn += 1
        return asking


if __name__ == "__main__":
    main()
