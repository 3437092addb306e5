"""`HttpRequest`: one HTTP request and its response, over ASGI's three callables."""

import asyncio
import re
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, get_args
from urllib.parse import parse_qsl

import msgspec

from openinfer_server.http.api_errors import ApiError, ErrorBody, from_decode_error, invalid
from openinfer_server.http.body_checks import check_elements
from openinfer_server.http.large_values import take_apart
from openinfer_server.http.sliced_json import SLICE_BYTES, decode_body
from openinfer_server.http.writers import (
    ARRIVAL,
    EVENT_STREAM,
    ClientDisconnected,
    Message,
    Receive,
    Scope,
    Send,
    StreamWriter,
    stream_writer,
)
from openinfer_server.limits.budgets import Budgets
from openinfer_server.limits.queued_work import run_for
from openinfer_server.limits.shared_budget import owner_of
from openinfer_server.options import ServerOptions

T = TypeVar("T")
Q = TypeVar("Q", bound=msgspec.Struct)
JSON = b"application/json"
ErrorForm = Callable[[ApiError], bytes]  # makes JSON of an error
ANTHROPIC_PATH = "/v1/messages"
ANTHROPIC_HEADER = b"anthropic-version"
TRACE_HEADERS = ("traceparent", "tracestate")
# What is taken from a client: nothing that could forge a line of the log.
_REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


class GivenBack(Exception):
    """Another process of the server answers the request."""


class HttpRequest:
    """One request.

    Attributes:
        status: status of the response that was begun; 0 before.
        error: what a refusal said; None otherwise.
        error_form: writes an error as the route's API does; None before the route is known, and where it is ours.
        parameters: of the path, by name.
        tenant: whose request it is; empty where all clients are one tenant.
        response_headers: what every response to it has, whatever it is.
        is_given_back: another process answers it (`give_back`).
        request_id: the client's own (`x-request-id`) or one made here; in the response's head and in the log.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, options: ServerOptions, budgets: Budgets) -> None:
        self.status = 0
        self.is_given_back = False
        self.error: ErrorBody | None = None
        self.error_form: ErrorForm | None = None
        self.parameters: Mapping[str, str] = {}
        self.tenant = ""
        self.options = options
        self.response_headers: tuple[tuple[bytes, bytes], ...] = ()
        self._budgets = budgets
        self._held_bytes = 0
        self._arrived_s = time.monotonic()  # all that is done for it is done in this order
        self._large_values: list[Any] | None = None
        self._scope = scope
        self._receive = receive
        self._asgi_send = send
        given = (self.header(b"x-request-id") or b"").decode("latin-1")
        self.request_id = given if _REQUEST_ID.fullmatch(given) else f"req_{secrets.token_hex(12)}"

    @property
    def owner(self) -> str:
        """Whose share of what is shared it takes: its tenant's, or its client's address without one."""
        if self.tenant:
            return self.tenant
        client: tuple[str, int] | None = self._scope.get("client")
        return owner_of(client[0]) if client else ""

    @property
    def method(self) -> str:
        return self._scope["method"]

    @property
    def path(self) -> str:
        """The path without the query, percent-decoded."""
        return self._scope["path"]

    @property
    def for_anthropic(self) -> bool:
        """Whether the client speaks Anthropic's API: by its header, or by the route it asks for."""
        return self.path.startswith(ANTHROPIC_PATH) or self.header(ANTHROPIC_HEADER) is not None

    def header(self, name: bytes) -> bytes | None:
        """The first header of this name, which is given in lower case."""
        return next((value for key, value in self._scope["headers"] if key == name), None)

    @property
    def trace_headers(self) -> dict[str, str]:
        """W3C's headers of a distributed trace, as far as the client sent them."""
        pairs = ((name.decode(), value.decode("latin-1")) for name, value in self._scope["headers"])
        return {name: value for name, value in pairs if name in TRACE_HEADERS}

    def read_query(self, kind: "type[Q]") -> Q:
        """The query as a Struct; fields of type `list[str] | None` may be repeated, with `[]` or without.

        Raises:
            ApiError: 400; a parameter is unknown, given twice or not of its type.
        """
        pairs = parse_qsl(self._scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True)
        lists = {field.name for field in msgspec.structs.fields(kind) if list[str] in get_args(field.type)}
        single: dict[str, str] = {}
        several: dict[str, list[str]] = {}
        for key, value in pairs:
            name = key.removesuffix("[]")
            if name in lists:
                several.setdefault(name, []).append(value)
            elif name in single:
                raise invalid(name[:100], f"{name[:100]} is given twice")
            else:
                single[name] = value
        try:
            return msgspec.convert({**single, **several}, kind, strict=False)
        except msgspec.ValidationError as error:
            raise from_decode_error(error) from error

    async def read_json(self, decoder: "msgspec.json.Decoder[T]", check: Callable[[T], None] | None = None) -> T:
        """The body as the route's type.

        Args:
            decoder: of that type.
            check: what else is asked of it; done where it is decoded.

        Raises:
            ApiError: 415, 413, 408 or 400, or what the check raises.
        """
        self._check_content_type()
        body = await self._read_body()

        held: list[Any] | None = None
        if self.is_large:
            held = self._large_values = []
            self._budgets.collector.begin()

        def decode() -> T:
            elements = check_elements(body, self.options.max_body_elements)
            value = decode_body(decoder, body, held=held, elements=elements)
            if check is not None:
                check(value)
            return value

        try:
            return await self.aside(decode)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise from_decode_error(error) from error

    @property
    def is_large(self) -> bool:
        """Whether its body is so large that work on all of it is done in threads."""
        return self._held_bytes > SLICE_BYTES

    async def aside(self, work: Callable[[], T], *, num_bytes: int = 0) -> T:
        """Does what takes as long as the body is large: of a large one in a thread, so that streams have their turn.

        Args:
            work: must hold the interpreter lock for 5 ms at most in one call of a C function.
            num_bytes: what it works on, where that is more than the body.

        Raises:
            ClientDisconnected: see `in_thread`.
        """
        if max(self._held_bytes, num_bytes) <= SLICE_BYTES:
            return work()
        return await self.in_thread(work)

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Does work in a thread, in this client's share of them. The body must have been read.

        Raises:
            ClientDisconnected: the client has left; work that had not begun is not done.
        """
        return await run_for(self, self._budgets.threads, work, order_s=self._arrived_s)

    def _check_content_type(self) -> None:
        # a page of another origin can post other types to a local server without a preflight
        content_type = self.header(b"content-type") or b""
        if content_type.split(b";")[0].strip().lower() != JSON:
            raise ApiError(415, "the content-type must be application/json", code="unsupported_media_type")
        encoding = self.header(b"content-encoding") or b""
        if encoding.strip().lower() not in {b"", b"identity"}:
            message = "the body must come as it is, without a content-encoding"
            raise ApiError(415, message, code="unsupported_media_type")
        transfer = self.header(b"transfer-encoding") or b""
        if transfer.strip().lower() not in {b"", b"chunked"}:  # RFC 9112, 6.1; what the parser reads is in chunks alone
            message = "the only transfer-encoding is chunked"
            raise ApiError(501, message, code="unsupported_transfer_encoding")

    async def _read_body(self) -> bytes:
        limit = self.options.max_body_bytes
        declared = self.header(b"content-length")
        if declared is not None and int(declared) > limit:
            raise _body_too_large(limit)  # said before anything is read
        body = bytearray()
        try:
            async with asyncio.timeout(self.options.body_timeout_s):
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnected
                    self._hold(part := message.get("body", b""))
                    body += part
                    if len(body) > limit:
                        raise _body_too_large(limit)
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError as error:
            text = f"the body did not arrive within {self.options.body_timeout_s:g} s"
            raise ApiError(408, text, code="timeout", headers=((b"connection", b"close"),)) from error

    def _hold(self, part: bytes) -> None:
        self._budgets.body_bytes.take(self.owner, len(part))
        self._held_bytes += len(part)

    def forget_body(self) -> None:
        """What was decoded of its body is needed no longer: it is freed, if nothing else refers to it. Idempotent."""
        if self._large_values is not None:
            held, self._large_values = self._large_values, None
            freed = self._budgets.threads.submit(self.owner, lambda: take_apart(held))
            freed.add_done_callback(lambda _: self._budgets.collector.end())

    def close(self) -> None:
        """The request has been answered: its body no longer counts."""
        self.forget_body()
        if self._held_bytes:
            self._budgets.body_bytes.give_back(self.owner, self._held_bytes)
            self._held_bytes = 0

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            request_id = self.request_id.encode()
            names = (b"x-request-id", b"request-id") if self.for_anthropic else (b"x-request-id",)
            added = (*self.response_headers, *((name, request_id) for name in names), *self._last_words())
            message = {**message, "headers": [*message["headers"], *added]}
        try:
            await self._asgi_send(message)
        except OSError as error:  # which servers may raise when the client has left
            raise ClientDisconnected from error
        except RuntimeError as error:
            if not self._transport_is_closing():
                raise
            raise ClientDisconnected from error

    def _last_words(self) -> tuple[tuple[bytes, bytes], ...]:
        """What a response of a handed-over connection has: the next request of its client may be another process's."""
        arrival = self._scope.get("extensions", {}).get(ARRIVAL)
        if arrival is None:
            return ()
        arrival.begins()
        return ((b"connection", b"close"),)

    def give_back(self) -> None:
        """Has the process that accepted the connection answer, if another did; before anything is answered.

        Raises:
            GivenBack: it does.
        """
        arrival = self._scope.get("extensions", {}).get(ARRIVAL)
        if arrival is not None and arrival.goes_back():
            self.is_given_back = True
            raise GivenBack

    def _transport_is_closing(self) -> bool:
        """Whether the server's connection has closed already: uvloop refuses such writes by a `RuntimeError`."""
        transport: asyncio.BaseTransport | None = getattr(getattr(self._asgi_send, "__self__", None), "transport", None)
        return transport is not None and transport.is_closing()

    async def disconnected(self) -> None:
        """Returns when the client is gone. The body must have been read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def send(
        self, status: int, body: bytes, *, content_type: bytes = JSON, headers: tuple[tuple[bytes, bytes], ...] = ()
    ) -> None:
        self.status = status
        head = [(b"content-type", content_type), (b"content-length", b"%d" % len(body)), *headers]
        await self._send({"type": "http.response.start", "status": status, "headers": head})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def send_error(self, error: ApiError) -> None:
        self.error = error.body
        if self.error_form is not None:
            body = self.error_form(error)
        else:
            body = error.to_anthropic_json() if self.for_anthropic else error.to_json()
        await self.send(error.status, body, headers=error.headers)

    def stream(self, num_choices: int, *, content_type: bytes = EVENT_STREAM) -> StreamWriter:
        """The writer of a response that is a stream of the events of so many choices."""
        if self._scope.get("http_version") == "1.0":
            raise ApiError(400, "streaming needs HTTP/1.1", param="stream", code="invalid_value")
        max_buffered_bytes = num_choices * self.options.max_buffered_bytes
        writer = stream_writer(self._scope, self._send, max_buffered_bytes=max_buffered_bytes)
        writer.content_type = content_type
        return writer


def _body_too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body exceeds {limit} bytes", code="body_too_large")
