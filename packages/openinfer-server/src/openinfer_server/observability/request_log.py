"""What the log says of requests: a line when one has been answered, and a line of the whole every ten seconds.

    request method=POST route=/v1/completions status=200 id=r_5 tenant=gold in=31 out=8 cached=16 ttft_ms=21.4 ms=97.0

Tokens are summed over the choices of a request, as the engine counts them. A refusal is a warning and has the error's
`code` and `param`, never its message, which may quote the client; a fault is an error. Answered reads (GET) are debug.
"""

import asyncio
import logging
import time
from dataclasses import dataclass, field
from typing import Any

from openinfer_core.engine import EngineStats
from openinfer_server.http.request import HttpRequest
from openinfer_server.observability.metrics import ServerMetrics
from openinfer_server.output.engine_link import EngineLink
from openinfer_server.output.response import Choice, choices_of_request

logger = logging.getLogger("openinfer.server")

STATS_PERIOD_S = 10.0


class RequestLog:
    """One HTTP request, from its arrival to its line; the choices submitted in its task are its own."""

    def __init__(self) -> None:
        self._choices: list[Choice] = []
        self._begun_s = time.monotonic()
        choices_of_request.set(self._choices)

    def end(self, http_request: HttpRequest, route: str) -> None:
        level = level_of(http_request.method, http_request.status)
        if logger.isEnabledFor(level):
            duration_s = time.monotonic() - self._begun_s
            logger.log(level, "request", extra={"fields": fields_of(http_request, route, self._choices, duration_s)})
        # Timers that the request has left behind hold its context, and with it this list.
        self._choices.clear()


def level_of(method: str, status: int) -> int:
    if status >= 500:
        return logging.ERROR
    if status >= 400:
        return logging.WARNING
    return logging.DEBUG if method in {"GET", "HEAD", "OPTIONS"} else logging.INFO


def fields_of(http_request: HttpRequest, route: str, choices: list[Choice], duration_s: float) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "method": http_request.method,
        "route": route,
        "status": http_request.status,
        "id": http_request.request_id,
    }
    if http_request.tenant:
        fields["tenant"] = http_request.tenant
    if http_request.error is not None:
        fields |= {key: value for key in ("code", "param") if (value := getattr(http_request.error, key)) is not None}
    if choices:
        fields["in"] = sum(choice.prompt_tokens for choice in choices)
        fields["out"] = sum(choice.completion_tokens for choice in choices)
        fields["cached"] = sum(choice.cached_tokens for choice in choices)
        firsts = [choice.first_token_s - choice.submitted_s for choice in choices if choice.first_token_s]
        if firsts:
            fields["ttft_ms"] = round(min(firsts) * 1e3, 1)
        failure = choices[0].response.failure
        if failure is not None:
            fields["failed"] = str(failure.kind)
    fields["ms"] = round(duration_s * 1e3, 1)
    return fields


@dataclass(frozen=True, slots=True)
class LogTotals:
    """The counters that a line of the whole shows the growth of."""

    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    ended: int
    failed: int
    time_s: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, metrics: ServerMetrics) -> "LogTotals":
        return cls(
            prompt_tokens=metrics.prompt_tokens.value,
            cached_tokens=metrics.cached_tokens.value,
            generated_tokens=metrics.generated_tokens.value,
            ended=metrics.ended.total(),
            failed=metrics.failures.total(),
        )


async def log_stats(link: EngineLink, *, period_s: float = STATS_PERIOD_S) -> None:
    """Logs the whole, each period in which there was a request."""
    before = LogTotals.of(link.metrics)
    while True:
        await asyncio.sleep(period_s)
        now = LogTotals.of(link.metrics)
        if link.num_open or now.ended + now.failed > before.ended + before.failed:
            logger.info(
                "stats", extra={"fields": stats_fields(before, now, await link.stats(), num_open=link.num_open)}
            )
        before = now


def stats_fields(before: LogTotals, now: LogTotals, stats: EngineStats | None, *, num_open: int) -> dict[str, Any]:
    seconds = max(now.time_s - before.time_s, 1e-9)
    prompt_tokens = now.prompt_tokens - before.prompt_tokens
    fields: dict[str, Any] = {
        "open": num_open,
        "ended": now.ended - before.ended,
        "failed": now.failed - before.failed,
        "prompt_tokens_per_s": round(prompt_tokens / seconds, 1),
        "generated_tokens_per_s": round((now.generated_tokens - before.generated_tokens) / seconds, 1),
        "cached": f"{(now.cached_tokens - before.cached_tokens) / prompt_tokens:.0%}" if prompt_tokens else "-",
    }
    if stats is not None:
        fields |= {
            "running": stats.running,
            "waiting": stats.waiting,
            "kv": f"{stats.blocks_used / stats.blocks_total:.0%}" if stats.blocks_total else "-",
            "preemptions": stats.preemptions,
        }
    return fields
