"""`/openapi.json`: what this server answers, as an OpenAPI document."""

from collections.abc import Iterable
from importlib.metadata import version

import msgspec

from openinfer_server.http.levels import Level
from openinfer_server.http.openapi import openapi_document
from openinfer_server.http.request import Exchange
from openinfer_server.http.routes import Route, RouteDoc
from openinfer_server.observability.operations import DISTRIBUTION


def document_route(routes: Iterable[Route], *, asks_for_keys: bool) -> Route:
    """The route of the document, which describes these routes and itself. It is made at the first request."""
    made: list[bytes] = []

    async def document(exchange: Exchange) -> None:
        if not made:
            content = openapi_document([*described, route], version=version(DISTRIBUTION), asks_for_keys=asks_for_keys)
            made.append(msgspec.json.encode(content))
        await exchange.send(200, made[0])

    described = list(routes)
    doc = RouteDoc(summary="This document.", tag="Operation", answer=dict[str, object])
    route = Route(method="GET", path="/openapi.json", handler=document, level=Level.PUBLIC, doc=doc)
    return route
