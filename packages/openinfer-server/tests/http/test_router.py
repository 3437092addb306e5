"""Which route serves what."""

import pytest

from openinfer_server import ConflictingRoutes, Level, Route, RouteDoc
from openinfer_server.http.api_errors import ApiError
from openinfer_server.http.router import Router

DOC = RouteDoc(summary="A test's.", tag="Test")


async def handler(http_request):
    """Answers nothing."""


def route(method: str, path: str) -> Route:
    return Route(method=method, path=path, handler=handler, doc=DOC)


LIST, MAKE, ONE, CANCEL, REST = (
    route("GET", "/a"),
    route("POST", "/a"),
    route("GET", "/a/{id}"),
    route("POST", "/a/{id}/cancel"),
    route("GET", "/models/{model:path}"),
)
ROUTER = Router([LIST, MAKE, ONE, CANCEL, REST])


@pytest.mark.parametrize(
    ("method", "path", "expected", "parameters"),
    [
        ("GET", "/a", LIST, {}),
        ("HEAD", "/a", LIST, {}),
        ("POST", "/a", MAKE, {}),
        ("GET", "/a/b", ONE, {"id": "b"}),
        ("GET", "/a/{id}", ONE, {"id": "{id}"}),
        ("POST", "/a/b.c/cancel", CANCEL, {"id": "b.c"}),
        ("GET", "/models/birds/parrot", REST, {"model": "birds/parrot"}),
        ("GET", "/models/a\nb", REST, {"model": "a\nb"}),
    ],
)
def test_route_is_found(method, path, expected, parameters):
    match = ROUTER.find(method, path)
    assert match.route is expected
    assert match.parameters == parameters


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/a/", 404),
        ("GET", "/A", 404),
        ("GET", "/a/b/c", 404),
        ("GET", "/models/", 404),
        ("DELETE", "/a", 405),
        ("POST", "/a/b", 405),
        ("GET", "/a/b/cancel", 405),
    ],
)
def test_route_is_refused(method, path, status):
    with pytest.raises(ApiError) as error:
        ROUTER.find(method, path)
    assert error.value.status == status


def test_wrong_method_names_the_right_ones():
    with pytest.raises(ApiError) as error:
        ROUTER.find("DELETE", "/a")
    assert error.value.headers == ((b"allow", b"GET, POST"),)
    with pytest.raises(ApiError, match=r"^/models/birds/parrot takes GET, not DELETE$"):
        ROUTER.find("DELETE", "/models/birds/parrot")


def test_unknown_path_is_not_echoed_at_length():
    with pytest.raises(ApiError) as error:
        ROUTER.find("GET", "/" + "x" * 10_000)
    assert len(str(error.value)) < 300


def test_two_routes_of_one_method_and_path_are_refused():
    with pytest.raises(ConflictingRoutes, match="POST /a is offered twice"):
        Router([LIST, MAKE, route("POST", "/a")])


def test_level_is_user_unless_declared():
    assert LIST.level is Level.USER
