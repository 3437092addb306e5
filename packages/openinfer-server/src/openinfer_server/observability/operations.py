"""Routes for operators: health, readiness, metrics, version."""

import asyncio
from importlib.metadata import version
from typing import Any

import msgspec

from openinfer_core.engine import EngineStats
from openinfer_server.http.access import Level
from openinfer_server.http.api_errors import busy
from openinfer_server.http.request import HttpRequest
from openinfer_server.http.routes import Handler, Route, RouteDoc
from openinfer_server.observability.exposition import CONTENT_TYPE
from openinfer_server.observability.metrics_page import metrics_page
from openinfer_server.observability.metrics_snapshot import summed
from openinfer_server.service import Service

DISTRIBUTION = "openinfer-server"
STATS_TIMEOUT_S = 5.0  # an engine process that does not answer for so long is not well


class Health(msgspec.Struct, frozen=True, omit_defaults=True):
    """Response of `/health`."""

    status: str  # `ok`, or what is wrong
    step_age_s: float | None  # seconds since the last step, while there is work; None if the engine did not say
    plugin_faults: tuple[str, ...] = ()  # plug-ins that broke their contract since the engine began


class VersionInfo(msgspec.Struct, frozen=True):
    """Response of `/version`."""

    version: str  # of the distribution openinfer-server


class Readiness(msgspec.Struct, frozen=True):
    """Response of `/ready`."""

    status: str


class Operations:
    """The routes' handlers."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def health(self, http_request: HttpRequest) -> None:
        """200 while the step loop turns; 503 when it hangs, is dead or does not answer.

        A plug-in that has had the loop for longer than a second is named, and so are those that broke their contract.
        """
        stats, lost, link = await self._stats(), self._service.peers.lost, self._service.link
        if lost is not None:
            status, health = 503, Health(lost, None)
        elif stats is None:
            status, health = 503, Health(link.ended_because if link.dead else "the engine does not answer", None)
        else:
            hangs = stats.step_age_s > self._service.options.health_max_step_age_s
            status, health = 503 if hangs else 200, _health(stats, hangs=hangs)
        await http_request.send(status, msgspec.json.encode(health))

    async def ready(self, http_request: HttpRequest) -> None:
        """200 while new requests are taken."""
        if self._service.draining or self._service.link.dead:
            await http_request.send(503, msgspec.json.encode(Readiness("ending")))
        else:
            await http_request.send(200, msgspec.json.encode(Readiness("ready")))

    async def metrics(self, http_request: HttpRequest) -> None:
        """Prometheus' text format; of all workers, whichever is asked."""
        service = self._service
        try:
            snapshots = [service.snapshot(), *await service.peers.snapshots()]
        except TimeoutError as error:
            raise busy("a worker does not say what it counted") from error
        body = metrics_page(
            summed(snapshots, max_model_tokens=service.info.max_model_tokens),
            service.info,
            await self._stats(),
            model_name=service.model_names[0],
            open_requests=sum(snapshot.open_requests for snapshot in snapshots),
        )
        await http_request.send(200, body, content_type=CONTENT_TYPE)

    async def version(self, http_request: HttpRequest) -> None:
        await http_request.send(200, msgspec.json.encode(VersionInfo(version(DISTRIBUTION))))

    async def _stats(self) -> EngineStats | None:
        try:
            async with asyncio.timeout(STATS_TIMEOUT_S):
                return await self._service.link.stats()
        except TimeoutError:
            return None


def _health(stats: EngineStats, *, hangs: bool) -> Health:
    status, call = "the engine's loop hangs" if hangs else "ok", stats.slow_call
    if call is not None:
        status = f"the scheduler {call.plugin} has been in {call.call} for {call.age_s:.1f} s"
    faults = tuple(
        f"{faults.plugin}, of {faults.group}: {kind} {count}"
        for faults in stats.plugin_faults
        for kind, count in faults.counts.items()
        if count
    )
    return Health(status, stats.step_age_s, faults)


def operation_routes(service: Service) -> list[Route]:
    operations = Operations(service)

    def get(path: str, handler: Handler, summary: str, **doc: Any) -> Route:
        about = RouteDoc(summary=summary, tag="Operation", **doc)
        return Route(method="GET", path=path, handler=handler, level=Level.PUBLIC, doc=about)

    return [
        get("/health", operations.health, "Whether the engine lives.", response=Health, unavailable=Health),
        get("/ready", operations.ready, "Whether requests are taken.", response=Readiness, unavailable=Readiness),
        get("/metrics", operations.metrics, "Numbers for Prometheus.", media_type=CONTENT_TYPE, errors=(503,)),
        get("/version", operations.version, "The server's version.", response=VersionInfo),
    ]
