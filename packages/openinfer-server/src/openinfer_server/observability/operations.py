"""Routes for operators: health, readiness, load, metrics, version, the prefix cache."""

import asyncio
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from typing import Any

import msgspec

from openinfer_core.control import FlushCache
from openinfer_core.engine import EngineCapability, EngineState, EngineStats
from openinfer_core.errors import EngineClosed, Refused
from openinfer_core.plugins import GRAMMAR_COMPILERS, QUEUE_POLICIES, SCHEDULERS
from openinfer_server.http.access import Level
from openinfer_server.http.api_errors import ApiError, busy, shutting_down
from openinfer_server.http.request import HttpRequest
from openinfer_server.http.routes import Handler, Route, RouteDoc
from openinfer_server.observability.exposition import CONTENT_TYPE
from openinfer_server.observability.metrics_page import metrics_page
from openinfer_server.observability.metrics_snapshot import MetricsSnapshot, budgets_of, summed
from openinfer_server.service import Service

PUBLIC = Level.PUBLIC
DISTRIBUTION = "openinfer-server"
ENGINE_TIMEOUT_S = 5.0  # an engine process that does not answer for so long is not well


class Health(msgspec.Struct, frozen=True, omit_defaults=True):
    """Response of `/health`."""

    status: str  # `ok`, or what is wrong
    step_age_s: float | None  # seconds since the last step, while there is work; None if the engine did not say
    plugin_faults: tuple[str, ...] = ()  # plug-ins that broke their contract since the engine began
    state: EngineState = EngineState.SERVING  # an engine that is paused or asleep is well


class VersionInfo(msgspec.Struct, frozen=True):
    """Response of `/version`."""

    version: str  # of the distribution openinfer-server


class Readiness(msgspec.Struct, frozen=True):
    """Response of `/ready`."""

    status: str


class Load(msgspec.Struct, frozen=True):
    """Response of `/load`."""

    server_load: int  # answers in the making: choices of all requests, of all workers; vLLM's name


class ResetQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Query of `/reset_prefix_cache`: there is nothing to choose."""


class CacheReset(msgspec.Struct, frozen=True):
    """Response of `/reset_prefix_cache`."""

    status: str = "reset"


class Operations:
    """The routes' handlers."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def health(self, http_request: HttpRequest) -> None:
        """200 while the step loop turns; 503 when it hangs, is dead or does not answer.

        A plug-in that has had the loop for longer than a second is named, and so are those that broke their contract.
        """
        is_well, health = await self._judge()
        await http_request.send(200 if is_well else 503, msgspec.json.encode(health))

    async def ready(self, http_request: HttpRequest) -> None:
        """200 while new requests are served and the engine is well; else what is wrong, as `/health` says it.

        That is also 503 while the engine is paused, asleep or without weights: `/health` is 200 then.
        """
        if self._service.draining:
            await http_request.send(503, msgspec.json.encode(Readiness("ending")))
            return
        is_well, health = await self._judge()
        serves = is_well and health.state is EngineState.SERVING
        status = "ready" if serves else (health.status if not is_well else health.state.replace("_", " "))
        await http_request.send(200 if serves else 503, msgspec.json.encode(Readiness(status)))

    async def _judge(self) -> tuple[bool, Health]:
        stats, lost, link = await self._stats(), self._service.peers.lost, self._service.link
        if lost is not None:
            return False, Health(lost, None)
        if stats is None:
            return False, Health(link.ended_because if link.dead else "the engine does not answer", None)
        hangs = stats.step_age_s > self._service.options.health_max_step_age_s
        return not hangs, _health(stats, hangs=hangs)

    async def metrics(self, http_request: HttpRequest) -> None:
        """Prometheus' text format; of all workers, whichever is asked."""
        service, snapshots, stats = self._service, await self._snapshots(), await self._stats()
        if stats is not None and not service.access.is_operator(
            http_request.header(b"authorization"), http_request.header(b"x-api-key")
        ):  # the page is public, and to others an adapter of some tenants is not there
            open_to_all = tuple(adapter for adapter in stats.adapters if not adapter.tenants)
            stats = msgspec.structs.replace(stats, adapters=open_to_all)
        body = metrics_page(
            summed(snapshots, max_model_tokens=service.info.max_model_tokens),
            service.info,
            stats,
            model_name=service.model_names[0],
            open_requests=_num_open(snapshots),
            budgets=budgets_of(snapshots),
            names=service.options.metrics_names,
        )
        await http_request.send(200, body, content_type=CONTENT_TYPE)

    async def load(self, http_request: HttpRequest) -> None:
        """How much the server does, for balancers."""
        body = Load(_num_open(await self._snapshots()))
        await http_request.send(200, msgspec.json.encode(body))

    async def reset_prefix_cache(self, http_request: HttpRequest) -> None:
        """Forgets computed prefixes; those that running requests use stay theirs, and KV tiers keep what they hold."""
        http_request.read_query(ResetQuery)
        link = self._service.link
        try:
            async with asyncio.timeout(ENGINE_TIMEOUT_S):
                await link.handle.control(FlushCache())
        except Refused as error:
            if EngineCapability.FLUSH_CACHE in self._service.info.capabilities:
                raise busy(str(error)) from error  # not now
            raise ApiError(400, str(error), code="not_supported") from error
        except EngineClosed as error:
            raise shutting_down(link.ended_because) from error
        except TimeoutError as error:
            raise busy("the engine does not answer") from error
        await http_request.send(200, msgspec.json.encode(CacheReset()))

    async def version(self, http_request: HttpRequest) -> None:
        await http_request.send(200, msgspec.json.encode(VersionInfo(version(DISTRIBUTION))))

    async def _snapshots(self) -> Sequence[MetricsSnapshot]:
        """What each worker counted."""
        try:
            return [self._service.snapshot(), *await self._service.peers.snapshots()]
        except TimeoutError as error:
            raise busy("a worker does not say what it counted") from error

    async def _stats(self) -> EngineStats | None:
        try:
            async with asyncio.timeout(ENGINE_TIMEOUT_S):
                return await self._service.link.stats()
        except TimeoutError:
            return None


_PARTS = {SCHEDULERS: "scheduler", QUEUE_POLICIES: "queue policy", GRAMMAR_COMPILERS: "grammar compiler"}


def _num_open(snapshots: Sequence[MetricsSnapshot]) -> int:
    return sum(snapshot.open_requests for snapshot in snapshots)


def _health(stats: EngineStats, *, hangs: bool) -> Health:
    status, call = "the engine's loop hangs" if hangs else "ok", stats.slow_call
    if call is not None:
        status = f"the {_PARTS.get(call.group, 'plug-in')} {call.plugin} has been in {call.call} for {call.age_s:.1f} s"
    faults = tuple(
        f"{faults.plugin}, of {faults.group}: {kind} {count}"
        for faults in stats.plugin_faults
        for kind, count in faults.counts.items()
        if count
    )
    return Health(status, stats.step_age_s, faults, stats.state)


def operation_routes(service: Service) -> list[Route]:
    operations = Operations(service)

    def route(method: str, path: str, handler: Handler, summary: str, level: Level = PUBLIC, **doc: Any) -> Route:
        about = RouteDoc(summary=summary, tag="Operation", **doc)
        return Route(method=method, path=path, handler=handler, level=level, doc=about)

    get = partial(route, "GET")
    pinged: Any = {"response": Health, "unavailable": Health}
    return [
        get("/health", operations.health, "Whether the engine lives.", response=Health, unavailable=Health),
        get("/ping", operations.health, "The same, under the name that SageMaker asks for.", **pinged),
        route("POST", "/ping", operations.health, "The same.", **pinged),
        get("/ready", operations.ready, "Whether requests are taken.", response=Readiness, unavailable=Readiness),
        get("/metrics", operations.metrics, "Numbers for Prometheus.", media_type=CONTENT_TYPE, errors=(503,)),
        get("/version", operations.version, "The server's version.", response=VersionInfo),
        get("/load", operations.load, "How much the server does.", Level.USER, response=Load, errors=(503,)),
        route(
            "POST",
            "/reset_prefix_cache",
            operations.reset_prefix_cache,
            "Forgets the prefixes that the engine has computed.",
            Level.ADMIN,
            query=ResetQuery,
            response=CacheReset,
            errors=(503,),
        ),
    ]
