"""The OpenAPI document of a server, generated from its routes and their msgspec types."""

import http
import re
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import version
from typing import Any, cast

import msgspec

from openinfer_server.http.access import Level
from openinfer_server.http.api_errors import AnthropicErrorResponse, ErrorResponse
from openinfer_server.http.request import JSON, HttpRequest
from openinfer_server.http.routes import Route, RouteDoc
from openinfer_server.http.writers import JSON_LINES
from openinfer_server.observability.operations import DISTRIBUTION
from openinfer_server.request.fields import sent_name
from openinfer_server.request.rules import Refused, Rule

OPENAPI_VERSION = "3.1.0"
EVENT_STREAM = "text/event-stream"
_REFERENCE = "#/components/schemas/"
_PARAMETER = re.compile(r"\{(\w+)(:path)?\}")
# Any route may answer so: a request can be malformed in ways no schema says or be addressed to another host, and a
# server can fail.
_ALWAYS = (400, 403, 500)
_WITH_BODY = (408, 413, 415, 503)  # any route that reads a body may answer so

Schema = dict[str, Any]
# How a key is shown; OpenAI's clients do it the one way, Anthropic's the other.
_KEYS: dict[str, Schema] = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x_api_key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


def openapi_document(routes: Iterable[Route], *, version: str, asks_for_keys: bool) -> Schema:
    routes = list(routes)
    types = list(dict.fromkeys(kind for route in routes for kind in _types(route.doc)))
    found, components = _schemas(types)
    schemas = dict(zip(types, found, strict=True))
    paths: dict[str, Schema] = {}
    for route in routes:
        path = _PARAMETER.sub(r"{\1}", route.path)
        operation = paths.setdefault(path, {})[route.method.lower()] = _operation(route, schemas)
        if asks_for_keys and route.level is not Level.PUBLIC:
            operation["security"] = [{name: []} for name in _KEYS]
    _apply_rules(components, types)
    return {
        "openapi": OPENAPI_VERSION,
        "info": {
            "title": "openinfer",
            "version": version,
            "description": "LLM inference over OpenAI's and Anthropic's protocols.",
        },
        "paths": paths,
        "components": {"schemas": components, **({"securitySchemes": _KEYS} if asks_for_keys else {})},
    }


def _schemas(types: Iterable[Any]) -> tuple[tuple[Schema, ...], dict[str, Schema]]:
    """Schemas of types, and the components they refer to. A type that has none, such as `object`, may be anything."""
    return msgspec.json.schema_components(types, schema_hook=_anything, ref_template=_REFERENCE + "{name}")


def _anything(kind: type) -> Schema:
    del kind
    return {"description": "Any JSON."}


def _types(doc: RouteDoc) -> Iterator[Any]:
    for kind in (
        doc.body,
        *_several(doc.response),
        doc.unavailable,
        *_several(doc.events),
        *_several(doc.lines),
        *doc.also,
        *_several(doc.error_body),
    ):
        if kind is not None:
            yield kind
    yield from (ErrorResponse, AnthropicErrorResponse)
    if doc.query is not None:
        yield doc.query


def _several(kinds: Any) -> tuple[Any, ...]:
    return cast("tuple[Any, ...]", kinds) if isinstance(kinds, tuple) else (kinds,)


def _operation(route: Route, schemas: dict[Any, Schema]) -> Schema:
    doc = route.doc
    operation: Schema = {
        "operationId": _operation_id(route),
        "summary": doc.summary,
        "tags": [doc.tag],
        "x-openinfer-level": route.level,
        "parameters": [*_path_parameters(route), *_query_parameters(doc)],
        "responses": _responses(route, schemas),
    }
    if doc.body is not None:
        operation["requestBody"] = {"required": True, "content": {JSON.decode(): {"schema": schemas[doc.body]}}}
    return operation


def _operation_id(route: Route) -> str:
    words = re.findall(r"\w+", route.path.replace(":path", ""))
    return "_".join([route.method.lower(), *words])


def _path_parameters(route: Route) -> Iterator[Schema]:
    for name, _ in _PARAMETER.findall(route.path):
        yield {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def _query_parameters(doc: RouteDoc) -> Iterator[Schema]:
    """Each field of the query's Struct; a parameter that is absent is null."""
    if doc.query is None:
        return
    _, components = _schemas([doc.query])
    rules: Mapping[str, Rule] = getattr(doc.query, "RULES", {})
    for name, schema in components[doc.query.__name__]["properties"].items():
        kinds = [kind for kind in schema.get("anyOf", [schema]) if kind != {"type": "null"}]
        if not isinstance(rules.get(name), Refused):
            yield {"name": name, "in": "query", "schema": kinds[0] if len(kinds) == 1 else {"anyOf": kinds}}


def _responses(route: Route, schemas: dict[Any, Schema]) -> Schema:
    content: Schema = {}
    doc, errors = route.doc, _errors(route, schemas)
    if not doc.media_type:
        return errors
    if doc.response is not None:
        content[doc.media_type.decode()] = {"schema": _any_of(doc.response, schemas)}
    else:
        content[doc.media_type.decode().partition(";")[0]] = {"schema": {"type": "string"}}
    if doc.events is not None:
        content[EVENT_STREAM] = {"schema": _event_schema(doc, schemas)}
    if doc.lines is not None:
        content[JSON_LINES.decode()] = {
            "schema": {"description": "Each line of the stream.", **_any_of(doc.lines, schemas)}
        }
    return {"200": {"description": "The answer.", "content": content}, **errors}


def _event_schema(doc: RouteDoc, schemas: dict[Any, Schema]) -> Schema:
    """One server-sent event, as OpenAPI 3.2 describes the items of such a stream."""
    data: Schema = {
        "type": "string",
        "contentMediaType": JSON.decode(),
        "contentSchema": _any_of(doc.events, schemas),
    }
    return {
        "type": "object",
        "description": "Each event of the stream.",
        "properties": {
            "event": {"type": "string"},
            "data": {"anyOf": [{"const": doc.last_data}, data]} if doc.last_data else data,
        },
        "required": ["data"],
    }


def _errors(route: Route, schemas: dict[Any, Schema]) -> Schema:
    responses: Schema = {}
    doc = route.doc
    error = _any_of(doc.error_body, schemas)
    if doc.error_body is ErrorResponse:
        error = {"anyOf": [error, schemas[AnthropicErrorResponse]]}
    read = _WITH_BODY if doc.body is not None else ()
    keyed = () if route.level is Level.PUBLIC else (401,)
    for status in sorted({*doc.errors, *_ALWAYS, *read, *keyed}):
        about = http.HTTPStatus(status).phrase
        responses[str(status)] = {"description": about, "content": {JSON.decode(): {"schema": error}}}
    if doc.unavailable is not None:
        content = {JSON.decode(): {"schema": schemas[doc.unavailable]}}
        responses["503"] = {"description": "It is not well; the body says why.", "content": content}
    return responses


def _any_of(kinds: Any, schemas: dict[Any, Schema]) -> Schema:
    several = [schemas[kind] for kind in _several(kinds)]
    return several[0] if len(several) == 1 else {"anyOf": several}


def _apply_rules(components: dict[str, Schema], types: Iterable[Any]) -> None:
    """Fields that are not honoured say so, with what they take."""
    for kind in _structs(types):
        rules: Mapping[str, Rule] = getattr(kind, "RULES", {})
        if not rules:
            continue
        qualified = f"{kind.__module__}.{kind.__qualname__}"  # msgspec's name for one of two types of one name
        properties = components[qualified if qualified in components else kind.__name__]["properties"]
        for name, rule in rules.items():
            sent = sent_name(kind, name)
            properties[sent] = rule.in_schema(properties[sent])


def _structs(types: Iterable[Any]) -> Iterator[type[msgspec.Struct]]:
    seen: set[type[msgspec.Struct]] = set()
    pending: list[object] = list(msgspec.inspect.multi_type_info(types))
    while pending:
        info = pending.pop()
        if isinstance(info, msgspec.inspect.StructType):
            if info.cls not in seen:
                seen.add(info.cls)
                yield info.cls
                pending += [field.type for field in info.fields]
        elif isinstance(info, msgspec.inspect.Type):
            for name in info.__struct_fields__:
                value = getattr(info, name)
                pending += value if isinstance(value, tuple) else [value]


def document_route(routes: Iterable[Route], *, asks_for_keys: bool) -> Route:
    """The route of the document, which describes these routes and itself. It is made at the first request."""
    made: list[bytes] = []

    async def document(http_request: HttpRequest) -> None:
        if not made:
            content = openapi_document([*described, route], version=version(DISTRIBUTION), asks_for_keys=asks_for_keys)
            made.append(msgspec.json.encode(content))
        await http_request.send(200, made[0])

    described = list(routes)
    doc = RouteDoc(summary="This document.", tag="Operation", response=dict[str, object])
    route = Route(method="GET", path="/openapi.json", handler=document, level=Level.PUBLIC, doc=doc)
    return route
