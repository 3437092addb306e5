"""Many streams at once, random disconnects, malformed bodies in between; afterwards everything is as before."""

import asyncio
import json
import random

from openinfer_server.testing import ParrotLoop, wait_until

NUM_CLIENTS = 64


def post(body: bytes) -> bytes:
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(body)}"
    return head.encode() + b"\r\nconnection: close\r\n\r\n" + body


async def stream(address, prompt: str, leave_after: int | None) -> str | None:
    """Text of a whole stream; None if the client left after so many events."""
    reader, writer = await asyncio.open_connection(*address)
    body = {"prompt": prompt, "max_tokens": 40, "stream": True, "stop": "!" if len(prompt) % 2 else None}
    writer.write(post(json.dumps(body).encode()))
    texts = []
    try:
        while True:
            line = await reader.readline()
            if not line:
                return "".join(texts)
            if line.startswith(b"data: {"):
                texts.append(json.loads(line[6:])["choices"][0]["text"])
            if leave_after is not None and len(texts) >= leave_after:
                return None
    finally:
        writer.transport.abort()


async def malformed(address, rng: random.Random) -> int:
    reader, writer = await asyncio.open_connection(*address)
    writer.write(post(rng.choice([b"{", b'{"prompt": 1}', b"\xff", b'{"prompt": "a", "n": 1000000}'])))
    status = int((await reader.readline()).split()[1])
    writer.transport.abort()
    return status


async def storm(address, rng: random.Random) -> list[tuple[str, str]]:
    leave = [rng.choice([None, None, 0, 1, rng.randrange(40)]) for _ in range(NUM_CLIENTS)]
    prompts = [f"The stone {i} is a mountain" for i in range(NUM_CLIENTS)]
    streams = asyncio.gather(*[stream(address, p, after) for p, after in zip(prompts, leave, strict=True)])
    refusals = asyncio.gather(*[malformed(address, rng) for _ in range(16)])
    texts, statuses = await streams, await refusals
    assert statuses == [400] * 16
    whole = [pair for pair, after in zip(zip(prompts, texts, strict=True), leave, strict=True) if after is None]
    assert len(whole) > 8
    return whole


def test_streams_with_random_disconnects_end_exactly_once(start, info, way, tokenizer, call):
    server = start(ParrotLoop(info, step_s=0.002), **way)
    rng = random.Random(7)
    whole = asyncio.run(storm(server.address, rng))
    for prompt, text in whole:
        ids = tokenizer.encode(prompt).ids
        assert text == tokenizer.decode([ids[i % len(ids)] for i in range(40)])

    def idle() -> bool:
        metrics = call(server, "GET", "/metrics")[2]
        running = b'openinfer_num_requests_running{model_name="parrot"} 0\n'
        return b"openinfer_requests_open 0\n" in metrics and running in metrics

    wait_until(idle, "an idle server")
    metrics = call(server, "GET", "/metrics")[2].decode()
    outcomes = [
        int(line.rsplit(" ", 1)[1])
        for line in metrics.splitlines()
        if line.startswith(("openinfer_request_success_total{", "openinfer_request_failures_total{"))
    ]
    assert sum(outcomes) == len(server.engine.submitted)
    assert "openinfer_request_faults_total 0" in metrics
    status, _, _ = call(server, "POST", "/v1/completions", {"prompt": "a"})
    assert status == 200
