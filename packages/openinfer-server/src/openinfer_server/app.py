"""The ASGI application: routes, errors, and the task of the engine link.

Any ASGI server can run it (its lifespan starts and ends the link); `serve` runs it under uvicorn with what that lacks.
"""

import asyncio
import contextlib
import logging
from collections.abc import Iterable
from pathlib import Path

from openinfer_core.engine import EngineHandle, adapter_part
from openinfer_core.sampling_defaults import NO_DEFAULTS, SamplingDefaults
from openinfer_server.builtin import BUILTIN
from openinfer_server.chat.template import ChatTemplate
from openinfer_server.errors import ServerError
from openinfer_server.http.access import Access, Level
from openinfer_server.http.api_errors import ApiError, internal
from openinfer_server.http.openapi import document_route
from openinfer_server.http.origins import Headers, Origins
from openinfer_server.http.request import GivenBack, HttpRequest
from openinfer_server.http.router import Router
from openinfer_server.http.routes import Endpoints, Route
from openinfer_server.http.writers import ClientDisconnected, Receive, Scope, Send
from openinfer_server.limits.admission import AdmissionControl, queue_bound
from openinfer_server.limits.budgets import Budgets
from openinfer_server.observability.loop_lag import watch_loop
from openinfer_server.observability.metrics import ServerMetrics
from openinfer_server.observability.request_log import RequestLog, log_stats
from openinfer_server.observability.tracing import Tracing
from openinfer_server.options import ServerOptions
from openinfer_server.output.engine_link import EngineLink
from openinfer_server.plan_parts import parsers_for
from openinfer_server.service import Service
from openinfer_server.text.model_text import ModelText
from openinfer_server.text.tokenizer import Tokenizer

logger = logging.getLogger("openinfer.server")

UNROUTED = "(none)"
CLIENT_GONE = 499  # nginx's status for a client that left; only metrics see it


class App:
    """An ASGI application that serves one engine; `endpoints` are APIs next to the built-in ones."""

    def __init__(self, service: Service, *, endpoints: Iterable[Endpoints] = ()) -> None:
        self.service = service
        self.link_ended = asyncio.Event()  # set when the engine has ended
        self._link_task: asyncio.Task[None] | None = None
        self._watch_tasks: list[asyncio.Task[None]] = []
        self._origins = Origins(service.options, service.access)
        routes = [route for api in (*BUILTIN, *endpoints) for route in api(service)]
        self.router = Router([*routes, document_route(routes, asks_for_keys=service.access.asks_for_keys)])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            http_request = HttpRequest(scope, receive, send, self.service.options, self.service.budgets)
            try:
                await self._serve(http_request)
            finally:
                http_request.close()

    def start(self) -> None:
        self._link_task = asyncio.create_task(self._run_link(), name="openinfer-link")
        self._watch_tasks = [
            asyncio.create_task(log_stats(self.service.link), name="openinfer-stats"),
            asyncio.create_task(watch_loop(self.service.metrics), name="openinfer-loop-lag"),
        ]

    async def stop(self) -> None:
        """Lets background requests end, for `drain_deadline_s`; then ends what is open and takes no more events."""
        for task in self._watch_tasks:
            task.cancel()
        if self._link_task is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.service.options.drain_deadline_s):
                    await self.service.link.drained()
            self._link_task.cancel()
            await asyncio.wait((self._link_task,))
        if self.service.link.tracing is not None:
            await self.service.link.tracing.close()
        self.service.tokenizer.close()
        self.service.budgets.close()

    async def _run_link(self) -> None:
        try:
            await self.service.link.run()
        finally:
            self.link_ended.set()

    async def _serve(self, http_request: HttpRequest) -> None:
        route, tracing, log = UNROUTED, self.service.link.tracing, RequestLog()
        trace = None if tracing is None else tracing.begin(http_request)
        try:
            self._origins.check_host(http_request.header(b"host"))
            preflight = self._preflight(http_request)
            if preflight is not None:
                await http_request.send(204, b"", headers=preflight)
                return
            match = self.router.find(http_request.method, http_request.path)
            route, http_request.parameters = match.route.path, match.parameters
            http_request.error_form = match.route.error_form
            http_request.tenant = self._admit(http_request, match.route)
            await self._handle(http_request, match.route)
        except ApiError as error:
            await _send_error(http_request, error)
        except ClientDisconnected:
            http_request.status = CLIENT_GONE
        except RecursionError:
            if http_request.status:
                raise
            await _send_error(http_request, ApiError(400, "the body is nested too deeply", code="invalid_json"))
        except Exception as error:
            logger.exception("%s %s failed (%s)", http_request.method, route, http_request.request_id)
            self.service.metrics.count_fault(error)
            if http_request.status:
                raise
            await _send_error(http_request, internal())
        finally:
            if tracing is not None and trace is not None:
                tracing.end(trace, http_request, route)
            self._count(http_request, route, log)

    async def _handle(self, http_request: HttpRequest, route: Route) -> None:
        if route.level is Level.PUBLIC:  # probes are answered however many requests there are
            await route.handler(http_request)
            return
        with self.service.budgets.request(http_request.owner), contextlib.suppress(GivenBack):
            await route.handler(http_request)

    def _count(self, http_request: HttpRequest, route: str, log: RequestLog) -> None:
        if not http_request.is_given_back:  # else it is counted where it is answered
            self.service.metrics.responses[route, http_request.status] += 1
            log.end(http_request, route)

    def _preflight(self, http_request: HttpRequest) -> Headers | None:
        """What answers a browser's question whether a page may ask; None for every other request."""
        origin = http_request.header(b"origin")
        if http_request.method == "OPTIONS":
            method, names = (http_request.header(b"access-control-request-" + name) for name in (b"method", b"headers"))
            return self._origins.preflight(origin, method, names)
        http_request.response_headers = self._origins.response_headers(origin)
        return None

    def _admit(self, http_request: HttpRequest, route: Route) -> str:
        return self.service.access.admit(
            route.level, http_request.header(b"authorization"), http_request.header(b"x-api-key")
        )

    def tenant_of(self, headers: Iterable[tuple[bytes, bytes]]) -> str:
        """Whose request it is by its headers; empty where no keys are asked for, or none that is known is shown."""
        fields = dict(headers)
        with contextlib.suppress(ApiError):
            return self.service.access.admit(Level.USER, fields.get(b"authorization"), fields.get(b"x-api-key"))
        return ""

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                self.start()
                await send({"type": "lifespan.startup.complete"})
            elif message["type"] == "lifespan.shutdown":
                await self.stop()
                await send({"type": "lifespan.shutdown.complete"})
                return


async def _send_error(http_request: HttpRequest, error: ApiError) -> None:
    """Clients may leave before they are refused; that is no fault of the server."""
    try:
        await http_request.send_error(error)
    except ClientDisconnected:
        http_request.status = CLIENT_GONE


def build_app(
    handle: EngineHandle,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    options: ServerOptions,
    *,
    endpoints: Iterable[Endpoints] = (),
    sampling_defaults: SamplingDefaults = NO_DEFAULTS,
) -> App:
    """Puts an application together.

    The caller closes `handle` after the application has stopped. Without a template `/v1/chat/completions` is refused.
    `options.endpoints` are names, which `load_app` looks up; `endpoints` are APIs next to the built-in ones.

    Raises:
        ConflictingRoutes: two APIs offer one method and path.
        UnusableParser, PluginError: see `choose_parsers`.
        ServerError: traces are asked for and cannot be made, or an adapter has the name of the model.
        UnusableKeys: see `Access.load`.
    """
    names = tuple(options.model_name) or (handle.info.model,)
    if taken := [name for name in names if adapter_part(name) in handle.info.composition]:
        raise ServerError(f"{taken[0]!r} names both the model that is served and an adapter (--lora): rename one")
    metrics = ServerMetrics(max_model_tokens=handle.info.max_model_tokens)
    parsers = parsers_for(template.source if template else None, handle.info.family, options)
    admission = AdmissionControl(max_requests=queue_bound(handle), max_tokens=options.max_queued_tokens)
    link = EngineLink(handle, metrics, admission=admission)
    access = Access.load(options.api_keys_file)
    service = Service(
        options,
        link,
        metrics,
        tokenizer,
        template,
        Budgets.of(options),
        parsers,
        access,
        sampling_defaults=sampling_defaults,
    )
    if options.otlp_traces_endpoint:
        service.link.tracing = Tracing(options.otlp_traces_endpoint, model_name=service.model_names[0])
    return App(service, endpoints=endpoints)


def load_app(handle: EngineHandle, model_dir: Path, options: ServerOptions) -> App:
    """Reads what a frontend needs of a model folder and puts an application together.

    Raises:
        UnusableTokenizer, UnusableTemplate, PluginError: see `ModelText.load`.
        ConflictingRoutes: two APIs offer one method and path.
    """
    return app_of(handle, ModelText.load(model_dir, options), options)


def app_of(handle: EngineHandle, text: ModelText, options: ServerOptions) -> App:
    """Puts an application together of an engine and what was read for it."""
    text.tokenizer.cover(handle.info.num_token_ids, handle.info.max_model_tokens)
    return build_app(
        handle,
        text.tokenizer,
        text.template,
        options,
        endpoints=text.endpoints,
        sampling_defaults=text.sampling_defaults,
    )
