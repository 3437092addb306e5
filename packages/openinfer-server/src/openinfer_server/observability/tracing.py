"""Spans for OpenTelemetry, made once per request and never per token.

    POST /v1/chat/completions           server span; the client's `traceparent` is its parent
        chat MODEL                      one per engine request, in the terms of the GenAI conventions
            queue ─► prefill ─► decode

All below the server span is made when the request has ended, from times that the metrics need anyway, and without a
tracer: whether the trace is sampled was decided above it. Opentelemetry is imported when tracing is asked for, and only
then.
"""

import asyncio
import contextlib
import importlib
import importlib.util
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from openinfer_core.errors import brought_by
from openinfer_core.events import FailureKind, FinishReason
from openinfer_core.request import GenerateRequest, with_fields
from openinfer_core.sampling import SamplingParams
from openinfer_server.errors import ServerError
from openinfer_server.http.request import HttpRequest
from openinfer_server.output.response import Choice

# What the conventions call `chat`; every other route is `text_completion`.
CHAT_PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
_EXPORT_TIMEOUT_S = 5.0
_SERVICE = "openinfer"


@dataclass(slots=True)
class HttpTrace:
    """The span of one HTTP request, current until `Tracing.end`."""

    span: Any
    token: Any


@dataclass(slots=True)
class ChoiceTrace:
    """What the span of one engine request will be made of."""

    context: Any
    parent: Any
    operation: str
    sampling: SamplingParams
    begun_ns: int


class Tracing:
    """Makes spans and sends them to a collector over OTLP/HTTP, in a thread of its own.

    Sampling and the resource's attributes follow OpenTelemetry's own environment variables.

    Raises:
        ServerError: OpenTelemetry is not installed.
    """

    def __init__(self, endpoint: str, *, model_name: str) -> None:
        needed = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
        if not all(_is_installed(name) for name in needed):
            raise ServerError(f"traces need OpenTelemetry, which is not installed: {brought_by('--otel')}")
        self._trace = importlib.import_module("opentelemetry.trace")
        self._context = importlib.import_module("opentelemetry.context")
        propagation = importlib.import_module("opentelemetry.trace.propagation.tracecontext")
        self._propagator = propagation.TraceContextTextMapPropagator()
        self._sdk = importlib.import_module("opentelemetry.sdk.trace")
        self._processor = _processor(endpoint)
        self._provider = self._sdk.TracerProvider(resource=_resource(), shutdown_on_exit=False)
        self._provider.add_span_processor(self._processor)
        name, ours = "openinfer_server", version("openinfer-server")
        self._tracer = self._provider.get_tracer(name, ours)
        instrumentation = importlib.import_module("opentelemetry.sdk.util.instrumentation")
        self._scope = instrumentation.InstrumentationScope(name, ours)
        self._operation = self._context.create_key("openinfer-operation")
        self._model_name = model_name
        self._open: dict[Choice, ChoiceTrace] = {}

    def begin(self, http_request: HttpRequest) -> HttpTrace | None:
        """Begins the span of a request; None for those that are not POST: probes and scrapes are no news."""
        if http_request.method != "POST":
            return None
        parent = self._propagator.extract(http_request.trace_headers)
        span = self._tracer.start_span("POST", context=parent, kind=self._trace.SpanKind.SERVER)
        operation = "chat" if http_request.path in CHAT_PATHS else "text_completion"
        context = self._context.set_value(self._operation, operation, self._trace.set_span_in_context(span))
        return HttpTrace(span, self._context.attach(context))

    def end(self, http: HttpTrace, http_request: HttpRequest, route: str) -> None:
        self._context.detach(http.token)
        if not http.span.is_recording():
            return
        http.span.update_name(f"POST {route}")
        http.span.set_attributes(
            {
                "http.request.method": "POST",
                "http.route": route,
                "url.path": http_request.path,
                "http.response.status_code": http_request.status,
                "openinfer.request_id": http_request.request_id,
            }
        )
        if http_request.status >= 500:
            http.span.set_status(self._trace.StatusCode.ERROR)
        http.span.end()

    def submit(self, choice: Choice, request: GenerateRequest) -> GenerateRequest:
        """Begins the span of an engine request; returns the request as a child of that span."""
        parent = self._trace.get_current_span().get_span_context()
        if not parent.trace_flags.sampled:
            return request
        operation = self._context.get_value(self._operation) or "text_completion"
        context = self._child_context(parent)
        self._open[choice] = ChoiceTrace(context, parent, operation, request.sampling, time.time_ns())
        trace_parent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
        return with_fields(request, trace_parent=trace_parent)

    def ended(self, choice: Choice, outcome: FinishReason | FailureKind, *, now_s: float) -> None:
        trace = self._open.pop(choice, None)
        if trace is None:
            return

        def at(time_s: float) -> int:
            return trace.begun_ns + round((time_s - choice.submitted_s) * 1e9)

        for name, begin_s, end_s in phases(choice, now_s):
            self._send(name, self._child_context(trace.context), trace.context, at(begin_s), at(end_s))
        attributes = {
            "gen_ai.operation.name": trace.operation,
            "gen_ai.provider.name": _SERVICE,
            "gen_ai.request.model": self._model_name,
            "gen_ai.usage.input_tokens": choice.prompt_tokens,
            **sampling_attributes(trace.sampling),
            **dict(outcome_attributes(choice, outcome)),
        }
        codes = self._trace.StatusCode
        self._send(
            f"{trace.operation} {self._model_name}",
            trace.context,
            trace.parent,
            trace.begun_ns,
            at(now_s),
            attributes=attributes,
            status=self._trace.Status(codes.ERROR if isinstance(outcome, FailureKind) else codes.UNSET),
        )

    def _child_context(self, parent: Any) -> Any:
        span_id = self._provider.id_generator.generate_span_id()
        return self._trace.SpanContext(parent.trace_id, span_id, False, parent.trace_flags, parent.trace_state)

    def _send(self, name: str, context: Any, parent: Any, begin_ns: int, end_ns: int, **further: Any) -> None:
        span = self._sdk.ReadableSpan(
            name,
            context,
            parent,
            self._provider.resource,
            start_time=begin_ns,
            end_time=end_ns,
            instrumentation_scope=self._scope,
            **further,
        )
        self._processor.on_end(span)

    async def close(self) -> None:
        # sends what is left, for a few seconds at most: a collector that is gone does not hold up the end
        loop, closed = asyncio.get_running_loop(), asyncio.Event()

        def shut_down() -> None:
            self._provider.shutdown()
            with contextlib.suppress(RuntimeError):  # the loop may be closed by then
                loop.call_soon_threadsafe(closed.set)

        threading.Thread(target=shut_down, name="openinfer-tracing-end", daemon=True).start()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_EXPORT_TIMEOUT_S):
                await closed.wait()


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a package above it is missing
        return False


def _resource() -> Any:
    ours = {
        "service.name": os.environ.get("OTEL_SERVICE_NAME", _SERVICE),
        "service.version": version("openinfer-server"),
    }
    return importlib.import_module("opentelemetry.sdk.resources").Resource.create(ours)


def _processor(endpoint: str) -> Any:
    export = importlib.import_module("opentelemetry.sdk.trace.export")
    otlp = importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    return export.BatchSpanProcessor(otlp.OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_TIMEOUT_S))


def sampling_attributes(sampling: SamplingParams) -> dict[str, int | float]:
    attributes: dict[str, int | float] = {
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
    }
    if sampling.top_k:
        attributes["gen_ai.request.top_k"] = sampling.top_k
    if sampling.seed is not None and sampling.seed < 2**63:  # attributes are signed
        attributes["gen_ai.request.seed"] = sampling.seed
    return attributes


def phases(choice: Choice, now_s: float) -> Iterator[tuple[str, float, float]]:
    """Name, begin and end of each phase that the request reached."""
    if choice.queued_s is None:
        yield "queue", choice.submitted_s, now_s
        return
    scheduled_s = choice.submitted_s + choice.queued_s
    yield "queue", choice.submitted_s, scheduled_s
    if not choice.first_token_s:
        yield "prefill", scheduled_s, max(scheduled_s, now_s)
        return
    yield "prefill", scheduled_s, max(scheduled_s, choice.first_token_s)
    yield "decode", choice.first_token_s, now_s


def outcome_attributes(choice: Choice, outcome: FinishReason | FailureKind) -> Iterator[tuple[str, Any]]:
    yield "gen_ai.usage.cache_read.input_tokens", choice.cached_tokens
    if choice.first_token_s:
        yield "gen_ai.response.time_to_first_chunk", choice.first_token_s - choice.submitted_s
    if isinstance(outcome, FailureKind):
        yield "error.type", str(outcome)
        return
    yield "gen_ai.response.finish_reasons", (str(outcome),)
    if outcome is not FinishReason.ABORT:
        yield "gen_ai.usage.output_tokens", choice.completion_tokens
