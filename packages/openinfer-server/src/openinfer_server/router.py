"""Which handler serves a path and method; anything else is 404 or 405."""

from collections.abc import Awaitable, Callable, Mapping

from openinfer_server.api_errors import ApiError
from openinfer_server.exchange import Exchange

Handler = Callable[[Exchange], Awaitable[None]]


class Router:
    """A table of exact paths, and one of paths that end in a name.

    Args:
        routes: path -> method -> handler. A path that ends in `/` takes any non-empty rest.
    """

    def __init__(self, routes: Mapping[str, Mapping[str, Handler]]) -> None:
        self._exact = {path: dict(methods) for path, methods in routes.items() if not path.endswith("/")}
        self._open = {path: dict(methods) for path, methods in routes.items() if path.endswith("/")}

    def find(self, method: str, path: str) -> tuple[str, Handler]:
        """The route's path, for metrics, and its handler. HEAD is served where GET is.

        Raises:
            ApiError: 404 or 405.
        """
        route = path if path in self._exact else self._open_route(path)
        if route is None:
            raise ApiError(404, f"there is no route {path[:200]}", code="unknown_url")
        methods = self._exact.get(route) or self._open[route]
        handler = methods.get("GET" if method == "HEAD" else method)
        if handler is None:
            allowed = ", ".join(sorted(methods))
            headers = ((b"allow", allowed.encode()),)
            raise ApiError(405, f"{route} takes {allowed}, not {method}", code="method_not_allowed", headers=headers)
        return route, handler

    def _open_route(self, path: str) -> str | None:
        return next((prefix for prefix in self._open if path.startswith(prefix) and len(path) > len(prefix)), None)
