"""Good requests: what they see while others attack."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from openinfer_bench.hostile.attacks import post

_RETRY_S = 0.05
PROMPT = "The stone wanted to be a mountain. " * 30


@dataclass(slots=True)
class Seen:
    """What good requests saw.

    Attributes:
        ttft_s: seconds from a request, its connection included, to its first event.
        gaps_s: seconds between two events of a stream.
        refusals: answers other than 200, which were asked again.
    """

    ttft_s: list[float] = field(default_factory=list[float])
    gaps_s: list[float] = field(default_factory=list[float])
    refusals: int = 0


async def ask(host: str, port: int, seen: Seen, *, prompt: str = PROMPT, max_tokens: int = 16) -> None:
    """One stream; refused requests are sent again, and their time goes on."""
    begin_s = time.monotonic()
    body = json.dumps({"prompt": prompt, "max_tokens": max_tokens, "stream": True}).encode()
    while not await _stream(host, port, body, begin_s, seen):
        seen.refusals += 1
        await asyncio.sleep(_RETRY_S)


async def _stream(host: str, port: int, body: bytes, begin_s: float, seen: Seen) -> bool:
    try:
        reader, writer = await asyncio.open_connection(host, port)
    except OSError:
        return False
    try:
        writer.write(post(body))
        if b" 200 " not in await reader.readline():
            return False
        last_s = 0.0
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                now_s = time.monotonic()
                (seen.gaps_s if last_s else seen.ttft_s).append(now_s - (last_s or begin_s))
                last_s = now_s
            elif line.startswith(b"data: [DONE]"):
                return True
        return bool(last_s)
    except OSError:
        return False
    finally:
        writer.close()


async def keep_asking(host: str, port: int, *, clients: int, seconds: float, max_tokens: int = 16) -> Seen:
    """So many clients, each asking again when it is answered, for so long."""
    seen, end_s = Seen(), time.monotonic() + seconds

    async def client() -> None:
        while time.monotonic() < end_s:
            await ask(host, port, seen, max_tokens=max_tokens)

    await asyncio.gather(*(client() for _ in range(clients)))
    return seen


def percentile(values: Sequence[float], share: float) -> float:
    """The value that so large a share of the others does not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
