"""Routes of other packages: found by name, served like ours, and their faults are one request's."""

import asyncio
import json
from importlib.metadata import EntryPoint

import pytest

from openinfer_core.errors import BrokenPlugin, UnknownPlugin
from openinfer_core.process.local import InProcessEngine
from openinfer_server import ConflictingRoutes, ServerOptions, frontend_parts, load_app
from openinfer_server.http.routes import ENDPOINTS, load_endpoints
from openinfer_server.testing import ParrotLoop

MODULE = """
import msgspec
from openinfer_server import ANY, Neutral, Refused, RequestFields, Route, RouteDoc

OPENINFER_CONTRACT = 1

class Count(msgspec.Struct):
    text: str

class ChatRequest(RequestFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    # the server has a type of this name, too
    colour: object = None
    shape: object = None
    RULES = {"colour": Neutral(ANY, "text has none"), "shape": Refused("text has none")}

def endpoints(service):
    async def count(exchange):
        body = await exchange.read_json(msgspec.json.Decoder(Count))
        token_ids = await service.tokenizer.encode(body.text, add_special_tokens=False)
        await exchange.send(200, msgspec.json.encode({"tokens": len(token_ids)}))

    async def broken(exchange):
        raise ZeroDivisionError("ours alone")

    doc = RouteDoc(
        summary="Counts tokens.", tag="Example", body=Count, response=dict[str, int], lines=Count, also=(ChatRequest,)
    )
    return [
        Route(method="POST", path="/count", handler=count, doc=doc),
        Route(method="GET", path="/count/{what}", handler=broken, doc=doc, error_form=lambda error: b'{"mine":1}'),
    ]

def greedy(service):
    return [Route(method="GET", path="/health", handler=None, doc=RouteDoc(summary="Mine.", tag="Example"))]
"""


@pytest.fixture
def counting(tmp_path, monkeypatch):
    """An installed package that offers the endpoints `counting` and `greedy`."""
    (tmp_path / "counting_endpoint.py").write_text(MODULE)
    folder = tmp_path / "counting_endpoint-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: counting-endpoint\nVersion: 1.0\n")
    lines = f"[{ENDPOINTS}]\ncounting = counting_endpoint:endpoints\ngreedy = counting_endpoint:greedy\n"
    (folder / "entry_points.txt").write_text(lines)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("counting")
def test_endpoint_is_served_when_it_is_asked_for(start, info, call):
    server = start(ParrotLoop(info), ServerOptions(port=0, endpoints=("counting",)))
    status, _, body = call(server, "POST", "/count", {"text": "stone stone"})
    assert status == 200
    assert json.loads(body)["tokens"] > 0
    assert call(server, "POST", "/count", {"texts": ""})[0] == 400
    paths = json.loads(call(server, "GET", "/openapi.json")[2])["paths"]
    assert set(paths["/count"]) == {"post"}
    assert set(paths["/count"]["post"]["responses"]["200"]["content"]) == {"application/json", "application/x-ndjson"}


@pytest.mark.usefixtures("counting")
def test_document_tells_types_of_one_name_apart(start, info, call):
    server = start(ParrotLoop(info), ServerOptions(port=0, endpoints=("counting",)))
    schemas = json.loads(call(server, "GET", "/openapi.json")[2])["components"]["schemas"]
    theirs = next(schema for schema in schemas.values() if "colour" in schema.get("properties", {}))
    assert theirs["properties"]["colour"]["description"] == "Changes nothing: text has none."
    assert theirs["properties"]["shape"]["type"] == "null"
    ours = next(schema for schema in schemas.values() if "web_search_options" in schema.get("properties", {}))
    assert ours["properties"]["web_search_options"]["type"] == "null"


@pytest.mark.usefixtures("counting")
def test_endpoint_that_raises_is_a_500_and_the_server_goes_on(start, info, call):
    server = start(ParrotLoop(info), ServerOptions(port=0, endpoints=("counting",)))
    status, _, body = call(server, "GET", "/count/x")
    assert (status, json.loads(body)) == (500, {"mine": 1})
    assert call(server, "GET", "/health")[0] == 200


@pytest.mark.usefixtures("counting")
def test_installed_endpoint_opens_no_route_unasked(start, info, call):
    assert call(start(ParrotLoop(info)), "POST", "/count", {"text": "stone"})[0] == 404


@pytest.mark.usefixtures("counting")
def test_plan_shows_where_an_endpoint_comes_from(model_dir):
    parts = frontend_parts(model_dir, "birds", ServerOptions(endpoints=("counting",)))
    assert parts["endpoint counting"] == "counting-endpoint 1.0"
    assert not any(name.startswith("endpoint") for name in frontend_parts(model_dir, "birds", ServerOptions()))


@pytest.mark.usefixtures("counting")
def test_endpoint_cannot_take_a_route_that_is_there(info, model_dir):
    engine = InProcessEngine(ParrotLoop(info))
    with pytest.raises(ConflictingRoutes, match="GET /health is offered twice"):
        load_app(engine, model_dir, ServerOptions(endpoints=("greedy",)))
    asyncio.run(engine.close())


def test_unknown_endpoint_is_refused_by_name():
    with pytest.raises(UnknownPlugin, match=r"'nothing' in openinfer\.endpoints"):
        load_endpoints(["nothing"], lister=lambda group: [])


def test_endpoint_that_does_not_load_is_an_error_with_its_cause():
    broken = EntryPoint("broken", "no_such_module_at_all:endpoints", ENDPOINTS)
    with pytest.raises(BrokenPlugin, match="no_such_module_at_all"):
        load_endpoints(["broken"], lister=lambda group: [broken])
