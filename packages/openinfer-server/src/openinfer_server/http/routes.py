"""`Route`: a method and a path, who may ask, which handler answers, and what the OpenAPI document says of it.

An API is a function from the `Service` to its routes (`Endpoints`). Ours and those of other packages (entry-point group
`openinfer.endpoints`) are the same kind of thing; `load_endpoints` finds the latter:
installing a package opens no route, `--endpoints` names those that do.
"""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from openinfer_core.plugins import Lister, find_plugin, installed
from openinfer_server.http.access import Level
from openinfer_server.http.api_errors import ErrorResponse
from openinfer_server.http.request import JSON, ErrorForm, HttpRequest
from openinfer_server.service import Service


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteDoc:
    """What a client can know of a route before asking.

    Attributes:
        summary: one line.
        tag: the group it is shown in.
        body: msgspec type of the request's JSON; None for a route without body.
        query: Struct whose fields are the query's parameters.
        response: msgspec type of the JSON that comes with 200, or a tuple of several; None if it is not JSON.
        unavailable: msgspec type of the JSON that comes with 503, where that is a response and not an error.
        media_type: content type of the response; empty if there is never one with 200.
        events: msgspec type of the data of server-sent events, or a tuple of several, if the response can be a stream.
        last_data: data of the last event where that is no JSON.
        lines: msgspec type of a line, or a tuple of several, if the response can be a stream of JSON, one value a line.
        also: further msgspec types that the schemas above refer to by name.
        errors: statuses other than those that any route may give.
        error_body: msgspec type of the JSON of an error.
    """

    summary: str
    tag: str
    body: Any = None
    query: type | None = None
    response: Any = None
    unavailable: Any = None
    media_type: bytes = JSON
    events: Any = None
    last_data: str = ""
    lines: Any = None
    also: tuple[Any, ...] = ()
    errors: tuple[int, ...] = ()
    error_body: Any = field(default=ErrorResponse)


Handler = Callable[[HttpRequest], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One thing the server answers.

    Attributes:
        method: in capitals; HEAD is served where GET is.
        path: `/v1/models/{model}`; `{name}` takes one segment, `{name:path}` the rest with its slashes. Neither may be
            empty.
        handler: answers it; faults in it are this request's alone.
        level: who may ask.
        doc: see there.
        error_form: makes the JSON of an error, where the API has a form of its own (`RouteDoc.error_body` is its type).
        is_stateless: whether any process of the server may answer it: nothing is kept that a later request asks for.
        may_go_back: whether any process may begin to answer it, whose handler gives those back that are not stateless
            (`HttpRequest.give_back`).
    """

    method: str
    path: str
    handler: Handler
    doc: RouteDoc
    level: Level = Level.USER
    error_form: ErrorForm | None = None
    is_stateless: bool = False
    may_go_back: bool = False


Endpoints = Callable[[Service], Iterable[Route]]  # an API: its routes on one server


ENDPOINTS = "openinfer.endpoints"


def load_endpoints(names: Iterable[str], *, lister: Lister = installed) -> Sequence[Endpoints]:
    """The plug-ins of these names.

    Raises:
        UnknownPlugin: none has a name; the message lists those that are there.
        AmbiguousPlugin: two packages offer one name.
        BrokenPlugin: its import failed.
    """
    return [find_plugin(ENDPOINTS, name, lister=lister).load() for name in names]
