"""`/`: a page to chat and to look at the server. Static files of this package, and nothing from anywhere else.

The page is an ordinary client of the routes it stands next to, with the key that its user types in. Its policy allows
scripts and styles from this server alone, no inline ones, and no text that becomes markup.
"""

from importlib.resources import files
from urllib.parse import quote

from openinfer_server.http.access import Level
from openinfer_server.http.request import HttpRequest
from openinfer_server.http.routes import Handler, Route, RouteDoc
from openinfer_server.service import Service

CONTENT_TYPES = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cache-control", b"no-cache"),
)


def page_routes(service: Service) -> list[Route]:
    del service
    folder = files("openinfer_server").joinpath("page")
    return [
        _static("/" if each.name == "index.html" else f"/page/{quote(each.name)}", each.name, each.read_bytes())
        for each in sorted(folder.iterdir(), key=lambda each: each.name)
    ]


def _static(path: str, name: str, body: bytes) -> Route:
    content_type = CONTENT_TYPES[name[name.rindex(".") :]]
    about = RouteDoc(summary=f"The page's {name}.", tag="Page", media_type=content_type)
    return Route(method="GET", path=path, handler=_handler(body, content_type), level=Level.PUBLIC, doc=about)


def _handler(body: bytes, content_type: bytes) -> Handler:
    async def send(http_request: HttpRequest) -> None:
        await http_request.send(200, body, content_type=content_type, headers=HEADERS)

    return send
