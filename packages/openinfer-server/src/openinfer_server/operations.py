"""Routes for operators: health, readiness, metrics, and the models there are."""

import asyncio

import msgspec

from openinfer_core.engine import EngineStats
from openinfer_server.api_responses import Model, ModelList
from openinfer_server.exchange import Exchange
from openinfer_server.exposition import CONTENT_TYPE
from openinfer_server.service import Service

STATS_TIMEOUT_S = 5.0
"""An engine process that does not answer for so long is not well."""
MODEL_PREFIX = "/v1/models/"


class Health(msgspec.Struct, frozen=True):
    """Answer of `/health`."""

    status: str
    step_age_s: float | None
    """Seconds since the last step, while there is work; None if the engine did not say."""


class Readiness(msgspec.Struct, frozen=True):
    """Answer of `/ready`."""

    status: str


class Operations:
    """The routes' handlers."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def health(self, exchange: Exchange) -> None:
        """200 while the step loop turns; 503 when it hangs, is dead or does not answer."""
        stats = await self._stats()
        if stats is None:
            await exchange.send(503, msgspec.json.encode(Health("the engine does not answer", None)))
        elif stats.step_age_s > self._service.options.health_max_step_age_s:
            await exchange.send(503, msgspec.json.encode(Health("the engine's loop hangs", stats.step_age_s)))
        else:
            await exchange.send(200, msgspec.json.encode(Health("ok", stats.step_age_s)))

    async def ready(self, exchange: Exchange) -> None:
        """200 while new requests are taken."""
        if self._service.draining or self._service.link.dead:
            await exchange.send(503, msgspec.json.encode(Readiness("ending")))
        else:
            await exchange.send(200, msgspec.json.encode(Readiness("ready")))

    async def metrics(self, exchange: Exchange) -> None:
        """Prometheus' text format."""
        service = self._service
        body = service.metrics.render(service.info, await self._stats(), open_requests=service.link.num_open)
        await exchange.send(200, body, content_type=CONTENT_TYPE)

    async def models(self, exchange: Exchange) -> None:
        """Names the server answers to."""
        await exchange.send(
            200, msgspec.json.encode(ModelList(data=[self._model(n) for n in self._service.model_names]))
        )

    async def model(self, exchange: Exchange) -> None:
        """One of them."""
        name = self._service.resolve_model(exchange.path.removeprefix(MODEL_PREFIX))
        await exchange.send(200, msgspec.json.encode(self._model(name)))

    def _model(self, name: str) -> Model:
        return Model(id=name, created=self._service.started)

    async def _stats(self) -> EngineStats | None:
        try:
            async with asyncio.timeout(STATS_TIMEOUT_S):
                return await self._service.link.stats()
        except TimeoutError:
            return None
