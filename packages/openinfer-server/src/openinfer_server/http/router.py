"""Which route serves a path and method; anything else is 404 or 405."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from openinfer_server.errors import ConflictingRoutes
from openinfer_server.http.api_errors import ApiError
from openinfer_server.http.routes import Route

_PARAMETER = re.compile(r"\{(\w+)(:path)?\}")


@dataclass(frozen=True, slots=True)
class Match:
    """A route and what its path's parameters are."""

    route: Route
    parameters: Mapping[str, str]


class Router:
    """A table of exact paths, and a list of paths with parameters, tried in their order.

    Raises:
        ConflictingRoutes: two are.
    """

    def __init__(self, routes: Iterable[Route]) -> None:
        self._methods: dict[str, dict[str, Route]] = {}
        for route in routes:
            methods = self._methods.setdefault(route.path, {})
            if route.method in methods:
                message = f"{route.method} {route.path} is offered twice; leave one of its --endpoints out"
                raise ConflictingRoutes(message)
            methods[route.method] = route
        self._patterns = [(path, _pattern(path)) for path in self._methods if "{" in path]

    @property
    def routes(self) -> list[Route]:
        return [route for methods in self._methods.values() for route in methods.values()]

    def find(self, method: str, path: str) -> Match:
        """The route of a request."""
        template, parameters = self._resolve(path)
        methods = self._methods[template]
        route = methods.get("GET" if method == "HEAD" else method)
        if route is None:
            allowed = ", ".join(sorted(methods))
            headers = ((b"allow", allowed.encode()),)
            message = f"{path[:200]} takes {allowed}, not {method}"
            raise ApiError(405, message, code="method_not_allowed", headers=headers)
        return Match(route, parameters)

    def _resolve(self, path: str) -> tuple[str, dict[str, str]]:
        if path in self._methods and "{" not in path:
            return path, {}
        for template, pattern in self._patterns:
            match = pattern.fullmatch(path)
            if match is not None:
                return template, match.groupdict()
        raise ApiError(404, f"there is no route {path[:200]}", code="unknown_url")


def _pattern(template: str) -> "re.Pattern[str]":
    parts: list[str] = []
    end = 0
    for parameter in _PARAMETER.finditer(template):
        name, characters = parameter[1], ".+" if parameter[2] else "[^/]+"
        parts += re.escape(template[end : parameter.start()]), f"(?P<{name}>{characters})"
        end = parameter.end()
    return re.compile("".join([*parts, re.escape(template[end:])]), re.DOTALL)
