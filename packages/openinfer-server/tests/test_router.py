"""Which handler serves what."""

import pytest

from openinfer_server.api_errors import ApiError
from openinfer_server.router import Router


async def one(exchange):
    """A handler."""


async def two(exchange):
    """Another."""


ROUTER = Router({"/a": {"GET": one, "POST": two}, "/a/": {"GET": two}})


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("GET", "/a", ("/a", one)),
        ("HEAD", "/a", ("/a", one)),
        ("POST", "/a", ("/a", two)),
        ("GET", "/a/b/c", ("/a/", two)),
    ],
)
def test_route_is_found(method, path, expected):
    assert ROUTER.find(method, path) == expected


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/", 404), ("GET", "/a/", 404), ("GET", "/A", 404), ("DELETE", "/a", 405), ("POST", "/a/b", 405)],
)
def test_route_is_refused(method, path, status):
    with pytest.raises(ApiError) as error:
        ROUTER.find(method, path)
    assert error.value.status == status


def test_unknown_path_is_not_echoed_at_length():
    with pytest.raises(ApiError) as error:
        ROUTER.find("GET", "/" + "x" * 10_000)
    assert len(str(error.value)) < 300
