"""`ApiError`: what a client is told when its request cannot be served, in OpenAI's shape or in Anthropic's.

Messages are written here, for the client; no exception's text is passed on unless it was made for it
(`InvalidRequest`, msgspec's validation, `Failed`).
"""

import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import msgspec

from openinfer_core.errors import InvalidRequest
from openinfer_core.events import Failed, FailureKind
from openinfer_server.http.nulls import without_nulls

RETRY_AFTER_S = 1  # what a client is told to wait when the queue is full or the server is ending


class ErrorBody(msgspec.Struct, frozen=True):
    """The object under `error`."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(msgspec.Struct, frozen=True):
    """A whole error response."""

    error: ErrorBody


class AnthropicErrorDetails(msgspec.Struct, frozen=True):
    """The object under `details` for Anthropic's clients."""

    error_code: str


class AnthropicErrorBody(msgspec.Struct, frozen=True):
    """The object under `error` for Anthropic's clients."""

    type: str
    message: str
    details: AnthropicErrorDetails | msgspec.UnsetType = msgspec.UNSET


class AnthropicErrorResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A whole error response for Anthropic's clients."""

    type: Literal["error"] = "error"
    error: AnthropicErrorBody


class ApiError(Exception):
    """Ends a request with a status and an error body.

    Attributes:
        status: HTTP status code.
        headers: further response headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers
        self.body = ErrorBody(message, _type_of(status), param, code)

    def to_json(self) -> bytes:
        return msgspec.json.encode(ErrorResponse(self.body))

    @property
    def anthropic_body(self) -> AnthropicErrorBody:
        kind, code = _ANTHROPIC_TYPES.get(self.status, _type_of(self.status)), self.body.code
        details = msgspec.UNSET if code is None else AnthropicErrorDetails(code)
        return AnthropicErrorBody(kind, self.body.message, details)

    def to_anthropic_json(self) -> bytes:
        return msgspec.json.encode(AnthropicErrorResponse(error=self.anthropic_body))

    def with_names(self, names: Mapping[str, str]) -> "ApiError":
        """The same error where the client's API has other names for fields: ours -> the client's."""
        body = self.body
        given = body.param
        if given is None or given not in names:
            return self
        name = names[given]
        message = re.sub(rf"\b{given}\b", name, body.message)
        return ApiError(self.status, message, param=name, code=body.code, headers=self.headers)


@contextmanager
def renamed(names: Mapping[str, str]) -> Generator[None]:
    """Errors from inside call fields as the request does: ours -> the request's."""
    try:
        yield
    except ApiError as error:
        raise error.with_names(names) from error


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def _type_of(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"


def refused(field: str, why: str) -> ApiError:
    return ApiError(400, f"{field} is not supported: {why}", param=field, code="unsupported_parameter")


def invalid(field: str, message: str) -> ApiError:
    return ApiError(400, message, param=field, code="invalid_value")


def from_invalid_request(error: InvalidRequest) -> ApiError:
    return ApiError(400, str(error), param=error.field, code="invalid_value")


def overloaded(message: str) -> ApiError:
    return ApiError(429, message, code="queue_full", headers=((b"retry-after", b"%d" % RETRY_AFTER_S),))


def busy(message: str, *, retry_after_s: int = RETRY_AFTER_S) -> ApiError:
    """The server, not its engine, has no room for more."""
    return ApiError(503, message, code="unavailable", headers=((b"retry-after", b"%d" % retry_after_s),))


def shutting_down(message: str) -> ApiError:
    """The server or its engine is ending; another replica, or this one later, may serve the request."""
    headers = ((b"retry-after", b"%d" % RETRY_AFTER_S), (b"connection", b"close"))
    return ApiError(503, message, code="unavailable", headers=headers)


def internal() -> ApiError:
    # a fault of ours; the log has it
    return ApiError(500, "the server failed on this request; its log says why", code="internal_error")


def from_failed(failed: Failed) -> ApiError:
    """The engine ended a request with a failure; its message is safe to show."""
    match failed.kind:
        case FailureKind.INVALID | FailureKind.NOT_FOUND:
            return _client_error(failed)
        case FailureKind.OVERLOADED:
            return overloaded(failed.message)
        case FailureKind.UNAVAILABLE:
            return busy(failed.message)
        case FailureKind.DEADLINE:
            # The same request again would be as late: OpenAI's and Anthropic's clients heed this header.
            no_retry = ((b"x-should-retry", b"false"),)
            return ApiError(504, failed.message, code="deadline_exceeded", headers=no_retry)
        case FailureKind.SHUTDOWN:
            return shutting_down(failed.message)
        case FailureKind.INTERNAL:
            return ApiError(500, failed.message, code="internal_error")


def _client_error(failed: Failed) -> ApiError:
    if failed.kind is FailureKind.NOT_FOUND:
        return ApiError(404, failed.message, param="model", code="model_not_found")
    return ApiError(400, failed.message, code="invalid_value")


_UNKNOWN_FIELD = re.compile(r"unknown field `(.*?)`(?: - at `[^`]*`)?$", re.DOTALL)  # any text is a field's name
_PATH = re.compile(r" - at `\$\.?([^`]*)`$")


def from_decode_error(error: Exception) -> ApiError:
    """The body is not JSON, or not of the route's type."""
    if isinstance(error, RecursionError):
        return ApiError(400, "the body is nested too deeply", code="invalid_json")
    if isinstance(error, UnicodeDecodeError):
        return ApiError(400, "the body is not valid UTF-8", code="invalid_json")
    message = str(error)
    if not isinstance(error, msgspec.ValidationError):
        return ApiError(400, f"the body is not valid JSON: {message}", code="invalid_json")
    path = _PATH.search(message)
    unknown = _UNKNOWN_FIELD.search(message)
    where = [path.group(1)] if path and path.group(1) else []
    if unknown:
        field = ".".join([*where, unknown.group(1)])
        return ApiError(400, f"unknown field: {field or repr(field)}", param=field, code="unknown_parameter")
    return ApiError(400, message, param=where[0] if where else None, code="invalid_type")


def convert_inside(given: Mapping[str, Any], kind: Any, where: str) -> Any:
    """A part of a body that was decoded as it came, as its type.

    Raises:
        ApiError: 400; its `param` begins with `where`.
    """
    try:
        return msgspec.convert(without_nulls(given), kind)
    except msgspec.ValidationError as error:
        told = from_decode_error(error)
        body = told.body
        param = where if body.param is None else f"{where}.{body.param}"
        raise ApiError(400, f"{body.message} (in {where})", param=param, code=body.code) from error
