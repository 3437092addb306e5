"""A storm on a real server before the real engine: many streams, aborts, malformed bodies, a pool of a few blocks.

The engine runs in this process so that the test can look at its scheduler afterwards; requests come over loopback.
"""

import asyncio
import json
import random
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx

from openinfer.models import find_family, find_model_dir
from openinfer_core import Failed, Finished, GenerateRequest, RequestId, TokenEvent
from openinfer_core.plugins import SCHEDULERS, find_plugin
from openinfer_core.process.local import InProcessEngine
from openinfer_engine import EngineOptions, StepLoop, build_loop, resolve
from openinfer_engine.scheduler import TokenBudgetScheduler
from openinfer_server import ServerOptions, serve

STREAMS = 64
NUM_BLOCKS = 14
SEED = 20261121
MALFORMED = (b"{", b"\xff\xfe{}", b'{"model": "tiny"}', b'{"model": "tiny", "prompt": "a", "nonsense": 1}', b"[" * 5000)


class Witness(InProcessEngine):
    """Notes how often each request ended."""

    def __init__(self, loop: StepLoop) -> None:
        super().__init__(loop)
        self.submitted: list[RequestId] = []
        self.ends: Counter[RequestId] = Counter()

    def submit(self, request: GenerateRequest) -> None:
        self.submitted.append(request.request_id)
        super().submit(request)

    async def events(self) -> AsyncIterator[list[TokenEvent]]:
        async for events in super().events():
            self.ends.update(event.request_id for event in events if isinstance(event, Finished | Failed))
            yield events


def make_engine() -> tuple[Witness, TokenBudgetScheduler, Path]:
    model_dir = find_model_dir("tiny")
    family, _ = find_family(model_dir)
    options = EngineOptions(num_blocks=NUM_BLOCKS, max_num_seqs=16, max_step_tokens=96)
    loop = build_loop(resolve(family.definition, model_dir, options))
    scheduler = loop.scheduler
    assert isinstance(scheduler, find_plugin(SCHEDULERS, "token-budget").load())
    return Witness(loop), scheduler, model_dir


async def stream_one(client: httpx.AsyncClient, rng: random.Random) -> str:
    """One streamed completion, perhaps left in the middle; returns how it went."""
    prompt = [rng.randrange(300, 1500) for _ in range(rng.randrange(1, 90))]
    body = {"model": "tiny", "prompt": prompt, "max_tokens": rng.randrange(1, 40), "stream": True, "ignore_eos": True}
    leave_after = rng.randrange(1, 10) if rng.random() < 0.4 else None
    tokens = 0
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                break
            if line.startswith("data: "):
                (choice,) = json.loads(line[6:])["choices"]
                tokens += choice["finish_reason"] is None
                if choice["finish_reason"] is not None:
                    assert choice["finish_reason"] == "length"
            if leave_after is not None and tokens >= leave_after:
                return "left"
    assert tokens == body["max_tokens"] or tokens == body["max_tokens"] - 1
    return "done"


async def send_malformed(client: httpx.AsyncClient, rng: random.Random) -> str:
    headers = {"content-type": "application/json"}
    response = await client.post("/v1/completions", content=rng.choice(MALFORMED), headers=headers)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["message"]
    return "refused"


def break_off(url: httpx.URL, rng: random.Random) -> str:
    """Half a request, then nothing."""
    with socket.create_connection((url.host, url.port or 80), timeout=10) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\ncontent-length: 999\r\n\r\n{"[: rng.randrange(1, 60)])
    return "broken off"


async def storm(url: str) -> Counter[str]:
    rng = random.Random(SEED)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        streams = [stream_one(client, random.Random(rng.random())) for _ in range(STREAMS)]
        noise = [send_malformed(client, random.Random(rng.random())) for _ in range(24)]
        broken = [asyncio.to_thread(break_off, client.base_url, random.Random(rng.random())) for _ in range(8)]
        return Counter(await asyncio.gather(*streams, *noise, *broken))


async def until(condition: Callable[[], bool], *, deadline_s: float = 60.0) -> None:
    """Looks again and again, because the engine's thread has no event to wait for."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, "the engine did not come to rest"
        await asyncio.to_thread(time.sleep, 0.01)


async def run() -> None:
    engine, scheduler, model_dir = make_engine()
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    server = asyncio.create_task(
        serve(engine, model_dir, ServerOptions(port=0, model_name=["tiny"]), on_ready=ready.set_result, stop=stop)
    )
    url = await ready
    outcome = await storm(url)
    assert outcome["refused"] == 24
    assert outcome["broken off"] == 8
    assert outcome["done"] + outcome["left"] == STREAMS
    assert outcome["left"] > 0

    await until(lambda: not scheduler.unfinished_ids and len(engine.ends) == len(set(engine.submitted)))
    assert set(engine.ends) == set(engine.submitted)
    assert set(engine.ends.values()) == {1}, "a request had more than one terminal event"
    stats = await engine.stats()
    assert stats.preemptions > 0, "the pool was not tight enough to prove anything"
    assert stats.blocks_used == 0
    scheduler.check_integrity()

    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
        body = {"model": "tiny", "prompt": "The capital of France is", "max_tokens": 16, "temperature": 0}
        answer = (await client.post("/v1/completions", json=body)).json()
        assert "Paris" in answer["choices"][0]["text"]
        assert (await client.get("/health")).status_code == 200
    stop.set()
    assert await server == 0
    await engine.close()


def test_a_storm_leaves_every_request_ended_once_and_the_pool_whole() -> None:
    asyncio.run(run())
