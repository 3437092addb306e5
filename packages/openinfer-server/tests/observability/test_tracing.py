"""Spans, as a collector on loopback receives them."""

import gzip
import http.client
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

import openinfer_server.observability.tracing
from openinfer_core.errors import InvalidRequest
from openinfer_core.events import Failed, FailureKind
from openinfer_server import ServerOptions
from openinfer_server.errors import ServerError
from openinfer_server.observability.tracing import Tracing
from openinfer_server.testing import ParrotLoop, ThreadedServer

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT_ID = "00f067aa0ba902b7"
SERVER, INTERNAL = 2, 1
ERROR = 2


class Collector:
    """Takes OTLP over HTTP; a context manager."""

    def __init__(self) -> None:
        collector = self
        self.spans = []
        self.resource = {}

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                collector.take(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"

    def take(self, request: ExportTraceServiceRequest) -> None:
        for each in request.resource_spans:
            self.resource = attributes(each.resource)
            self.spans += [span for scope in each.scope_spans for span in scope.spans]

    def __enter__(self):
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def attributes(holder) -> dict[str, object]:
    """Attributes of a span or a resource as Python values."""
    values = {}
    for each in holder.attributes:
        kind = each.value.WhichOneof("value")
        value = getattr(each.value, kind)
        values[each.key] = [item.string_value for item in value.values] if kind == "array_value" else value
    return values


@pytest.fixture
def trace(model_dir, info):
    """Serves, lets the test ask, ends the server (which sends what is left); the collector and the engine."""

    def run(ask, loop: ParrotLoop | None = None) -> tuple[Collector, ThreadedServer]:
        with Collector() as collector:
            options = ServerOptions(port=0, otlp_traces_endpoint=collector.url, model_name=["bird"])
            with ThreadedServer(loop or ParrotLoop(info), model_dir, options) as server:
                ask(server)
        return collector, server

    return run


def post(server: ThreadedServer, path: str, body: object, **headers: str) -> int:
    connection = http.client.HTTPConnection(*server.address, timeout=20)
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json", **headers})
    response = connection.getresponse()
    response.read()
    connection.close()
    return response.status


CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5, "seed": 7, "temperature": 0.5, "n": 2}


def test_request_has_a_tree_of_spans_under_the_clients_own(trace):
    def ask(server):
        parent = f"00-{TRACE_ID}-{PARENT_ID}-01"
        assert post(server, "/v1/chat/completions", CHAT, traceparent=parent, **{"x-request-id": "mine"}) == 200

    collector, server = trace(ask)
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE_ID}
    assert collector.resource["service.name"] == "openinfer"
    (root,) = (span for span in collector.spans if span.kind == SERVER)
    assert (root.name, root.parent_span_id.hex()) == ("POST /v1/chat/completions", PARENT_ID)
    about = attributes(root)
    assert about["http.route"] == about["url.path"] == "/v1/chat/completions"
    assert (about["http.response.status_code"], about["openinfer.request_id"]) == (200, "mine")
    choices = [span for span in collector.spans if span.parent_span_id == root.span_id]
    assert [(span.name, span.kind) for span in choices] == [("chat bird", INTERNAL)] * 2
    for choice in choices:
        phases = [span for span in collector.spans if span.parent_span_id == choice.span_id]
        assert [span.name for span in phases] == ["queue", "prefill", "decode"]
        ends = [choice.start_time_unix_nano]
        for phase in phases:
            assert ends[-1] <= phase.start_time_unix_nano <= phase.end_time_unix_nano
            ends.append(phase.start_time_unix_nano)
        assert phases[-1].end_time_unix_nano <= choice.end_time_unix_nano <= root.end_time_unix_nano
    assert len(collector.spans) == 1 + 2 * 4
    engine_parents = [request.trace_parent for request in server.engine.submitted]
    assert sorted(engine_parents) == sorted(f"00-{TRACE_ID}-{span.span_id.hex()}-01" for span in choices)


def test_attributes_are_those_of_the_genai_conventions(trace):
    collector, _ = trace(lambda server: post(server, "/v1/chat/completions", {**CHAT, "n": 1, "top_p": 0.75}))
    (about,) = (attributes(span) for span in collector.spans if span.name == "chat bird")
    assert about.pop("gen_ai.response.time_to_first_chunk") > 0
    assert about.pop("gen_ai.usage.input_tokens") > 5
    assert about.pop("gen_ai.usage.cache_read.input_tokens") > 0
    assert about == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openinfer",
        "gen_ai.request.model": "bird",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.75,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.request.seed": 7,
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.output_tokens": 5,
    }


def test_nothing_that_was_said_is_in_a_span(trace):
    secret = "a-very-private-question"
    collector, _ = trace(lambda server: post(server, "/v1/completions", {"prompt": secret, "max_tokens": 40}))
    assert collector.spans
    assert all(secret not in str(span) and "private" not in str(span) for span in collector.spans)
    assert any(span.name == "text_completion bird" for span in collector.spans)


def test_probes_make_no_spans_and_refused_requests_one(trace, call):
    def ask(server):
        for path in ("/health", "/metrics", "/v1/models"):
            call(server, "GET", path)
        assert post(server, "/v1/completions", {"prompt": "a", "n": 0}) == 400

    collector, _ = trace(ask)
    assert [(span.name, attributes(span)["http.response.status_code"]) for span in collector.spans] == [
        ("POST /v1/completions", 400)
    ]


def test_client_that_asks_not_to_be_sampled_is_not(trace):
    collector, server = trace(
        lambda server: post(server, "/v1/completions", {"prompt": "a"}, traceparent=f"00-{TRACE_ID}-{PARENT_ID}-00")
    )
    assert collector.spans == []
    assert [request.trace_parent for request in server.engine.submitted] == [None]


class Refusing(ParrotLoop):
    """Fails every request."""

    def submit(self, request):
        return [Failed(request.request_id, FailureKind.OVERLOADED, "the queue is full")]


def test_failed_request_says_so_and_ends_in_the_queue(trace, info):
    collector, _ = trace(lambda server: post(server, "/v1/completions", {"prompt": "a"}), Refusing(info))
    (choice,) = (span for span in collector.spans if span.name == "text_completion bird")
    assert attributes(choice)["error.type"] == "overloaded"
    assert choice.status.code == ERROR
    assert [span.name for span in collector.spans if span.parent_span_id == choice.span_id] == ["queue"]


def test_collector_that_is_gone_costs_no_request(model_dir, info):
    options = ServerOptions(port=0, otlp_traces_endpoint="http://127.0.0.1:9/v1/traces")
    with ThreadedServer(ParrotLoop(info), model_dir, options) as server:
        assert post(server, "/v1/completions", {"prompt": "a"}) == 200
    assert server.exit_code == 0


def test_without_opentelemetry_the_server_does_not_start(monkeypatch):
    monkeypatch.setattr(openinfer_server.observability.tracing.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ServerError, match=r"\./run install --otel"):
        Tracing("http://127.0.0.1:9", model_name="m")


def test_endpoint_must_be_a_url():
    with pytest.raises(InvalidRequest, match="must be a URL"):
        ServerOptions(otlp_traces_endpoint="localhost:4318")
