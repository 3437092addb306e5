"""How late the event loop is: what holds it, or holds the interpreter, holds every stream."""

import asyncio
import time

from openinfer_server.observability.metrics import ServerMetrics

INTERVAL_S = 0.1


async def watch_loop(metrics: ServerMetrics) -> None:
    """Sleeps again and again, and counts by how much each time was longer."""
    while True:
        begin_s = time.perf_counter()
        await asyncio.sleep(INTERVAL_S)
        metrics.event_loop_lag_s.observe(max(0.0, time.perf_counter() - begin_s - INTERVAL_S))
