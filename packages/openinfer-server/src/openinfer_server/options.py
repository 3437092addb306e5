"""`ServerOptions`: everything a user can set about the server, in one frozen Struct."""

import re
from enum import StrEnum

import msgspec

from openinfer_core.errors import InvalidRequest
from openinfer_core.sampling_defaults import SamplingDefaultsFrom
from openinfer_server.observability.metric_names import MetricsNames

_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.\-]*://[^/\s]+")

MAX_WORKERS = 128
MAX_LARGE_WORKERS = 32
MAX_KNOWN_PREFIX_BYTES = 2**40
MAX_LARGE_REQUEST_BYTES = 2**40


class EventLoop(StrEnum):
    """Which asyncio event loop carries the server."""

    AUTO = "auto"
    """uvloop if it is installed, else asyncio's own."""
    ASYNCIO = "asyncio"
    UVLOOP = "uvloop"


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the server listens, what it bounds and how it ends.

    Raises:
        InvalidRequest: a value is out of range; `field` names it.
    """

    host: str = "127.0.0.1"
    """Address to listen on. For other addresses than loopback give --api-keys-file and --tls-cert-file, or put a proxy
    in front that has both."""
    port: int = 8000
    """0 lets the system choose; the line that says the server is ready has it."""
    model_name: list[str] = []
    """A name clients may ask for; may be given several times, and the first one is shown. None means the engine's own
    name."""
    workers: int = 1
    """Processes that serve the port, all before one engine. Each has its own bounds, and its own stored responses."""
    large_request_bytes: int = 32 * 2**10
    """Requests with a body of so many bytes, or of no told length, are read, rendered, encoded and answered in a
    process of their own, so that streams of others do not wait for them (Linux, without TLS). It is started with the
    server if the model's context has 16,384 tokens or more, else by the first of them. 0: in the same process."""
    large_request_workers: int = 1
    """Processes for large requests. A conversation's turns come to one of them, by its owner and the first 32 KiB of
    the body: conversations that begin alike for as long share one. Each keeps --known-prefix-bytes of its own."""
    event_loop: EventLoop = EventLoop.AUTO
    endpoints: tuple[str, ...] = ()
    """Further APIs, by their names in the entry-point group `openinfer.endpoints`."""

    api_keys_file: str = ""
    """TOML file of API keys with their tenants and levels (SECURITY.md); empty: no key is asked for, and the routes of
    operators are closed."""
    tls_cert_file: str = ""
    """Certificate chain in PEM; empty: plain HTTP."""
    tls_key_file: str = ""
    """Its private key in PEM, not encrypted; empty if it is in the certificate file."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose web pages may use the server, such as `https://app.example`; `*` for all; empty for none."""
    allowed_hosts: tuple[str, ...] = ()
    """Further names that a server on loopback without keys may be addressed by; others are refused (DNS rebinding)."""
    otlp_traces_endpoint: str = ""
    """Where OpenTelemetry spans go, over OTLP/HTTP, such as http://127.0.0.1:4318/v1/traces; empty: none are made.
    Needs `./run install --otel`."""
    metrics_names: MetricsNames = MetricsNames.OPENINFER
    """Names of metrics that vLLM has, too: openinfer, or vllm, as in vllm:num_requests_waiting, which llm-d, KEDA rules
    and dashboards of vLLM ask for."""

    tool_parser: str = "auto"
    """What finds tool calls in the output: a name in the entry-point group `openinfer.tool_parsers`, auto (by the chat
    template), or none."""
    reasoning_parser: str = "auto"
    """What tells reasoning from content: a name in `openinfer.reasoning_parsers`, auto, or none."""

    sampling_defaults: SamplingDefaultsFrom = SamplingDefaultsFrom.MODEL
    """What a request that gives no temperature, top_p, top_k, min_p or penalty is sampled with: as the model's
    generation_config.json says, or none of it. What a request gives counts before either."""

    strict: bool = False
    """Refuse what is otherwise dropped with notice: tools that search the web, which clients offer with every request
    (FIELDS.md)."""

    max_body_bytes: int = 8 * 2**20
    """A longer request body is answered with 413 while it is read."""
    max_body_elements: int = 2**18
    """Commas and opening brackets in a body, whose decoding they make slow; a body with more is refused with 400."""
    max_open_body_bytes: int = 512 * 2**20
    """Bodies of all requests that have not been answered; one that would exceed it is refused with 503."""
    max_head_bytes: int = 32 * 2**10
    """URL and headers together; longer ones are refused with 431."""
    max_url_bytes: int = 8 * 2**10
    """A longer URL is refused with 414."""
    max_choices: int = 128
    """Prompts x `n` of one request."""
    max_request_tokens: int = 2**22
    """Prompt tokens x `n`, over all prompts of one request."""
    max_request_kv_tokens: int = 2**24
    """Prompt and `max_tokens` of every choice of one request: the room in the KV cache that it may come to need."""
    max_queued_tokens: int = 2**23
    """Prompt tokens of all requests in the engine's queue; one that would exceed it is refused with 429."""
    max_connections: int | None = None
    """Connections with a request, which further ones are refused beside with 503; idle ones make room. By default as
    many as the limit of open files (ulimit -n) leaves room for, up to 4096; more than that is refused at the start."""
    max_logprob_entries: int = 2**20
    """(tokens + prompt tokens if echoed) x (alternatives + 1) of one request."""
    max_stored_responses: int = 1024
    """Responses of `/v1/responses` that are kept in memory; the oldest make room."""
    max_stored_response_bytes: int = 64 * 2**20
    """Size of all stored responses, as JSON."""
    known_prefix_bytes: int = 256 * 2**20
    """Token ids and texts of chats that each API worker keeps, so that of a conversation's next turn only what is new
    is encoded; 8 bytes a token, and 2 or 3 a character. Tenants, or addresses without keys, share them. 0: none."""
    max_buffered_bytes: int = 256 * 2**10
    """What the client of a stream may leave unread per choice before it is disconnected and its request aborted; an
    echoed prompt comes on top."""

    head_timeout_s: float = 5.0
    """From the first byte of a request to the end of its headers; a later one is refused with 408."""
    body_timeout_s: float = 30.0
    """From the end of the headers to the end of the body; a later one is refused with 408."""
    write_timeout_s: float = 30.0
    """How long a client may take to read what is left of a complete response; then it is disconnected."""
    keep_alive_s: int = 75
    """How long an idle connection stays open."""
    template_timeout_s: float = 1.0
    """How long the chat template may run on one request."""
    drain_deadline_s: float = 30.0
    """After SIGTERM running requests may finish for so long, then they are aborted."""
    health_max_step_age_s: float = 60.0
    """`/health` is 503 when the engine has had work for so long without completing a step."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise InvalidRequest(f"port is {self.port}; it must be between 0 and 65535", field="port")
        for name in _AT_LEAST_ONE:
            value: float | None = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidRequest(f"{name} must be at least 1", field=name)
        for name in _SECONDS:
            if not 0 < getattr(self, name) <= 86400:
                raise InvalidRequest(f"{name} must be in (0, 86400] seconds", field=name)
        if self.otlp_traces_endpoint and not self.otlp_traces_endpoint.startswith(("http://", "https://")):
            message = f"otlp_traces_endpoint is {self.otlp_traces_endpoint!r}; it must be a URL of http or https"
            raise InvalidRequest(message, field="otlp_traces_endpoint")
        _check_range("workers", self.workers, least=1, most=MAX_WORKERS)
        _check_range("large_request_workers", self.large_request_workers, least=1, most=MAX_LARGE_WORKERS)
        _check_range("large_request_bytes", self.large_request_bytes, least=0, most=MAX_LARGE_REQUEST_BYTES)
        _check_range("known_prefix_bytes", self.known_prefix_bytes, least=0, most=MAX_KNOWN_PREFIX_BYTES)
        if "" in self.model_name:
            raise InvalidRequest("a model name is empty", field="model_name")
        if self.tls_key_file and not self.tls_cert_file:
            raise InvalidRequest("tls_key_file needs tls_cert_file", field="tls_key_file")
        _check_origins(self.cors_origins)


def _check_range(name: str, value: int, *, least: int, most: int) -> None:
    if not least <= value <= most:
        raise InvalidRequest(f"{name} is {value}; it must be between {least} and {most}", field=name)


def _check_origins(origins: tuple[str, ...]) -> None:
    for origin in origins:
        if not _ORIGIN.fullmatch(origin):
            message = f"{origin!r} is no origin; one is like https://app.example or http://localhost:3000, or is *"
            raise InvalidRequest(message, field="cors_origins")


_AT_LEAST_ONE = (
    "max_body_bytes",
    "max_head_bytes",
    "max_url_bytes",
    "max_choices",
    "max_body_elements",
    "max_open_body_bytes",
    "max_request_tokens",
    "max_request_kv_tokens",
    "max_queued_tokens",
    "max_connections",
    "max_logprob_entries",
    "max_stored_responses",
    "max_stored_response_bytes",
    "max_buffered_bytes",
)
_SECONDS = (
    "head_timeout_s",
    "body_timeout_s",
    "write_timeout_s",
    "keep_alive_s",
    "template_timeout_s",
    "drain_deadline_s",
    "health_max_step_age_s",
)
