"""Which web pages may use the server, told by what browsers send: `Host` and `Origin`.

A page of any site can make a browser send requests to servers on its user's machine. Three things keep it out: a body
must be JSON, which no page of another origin may post without a preflight; preflights are answered only for
`cors_origins`; and a server that listens on loopback and asks for no key takes only requests that were addressed to
loopback, because a site can have its own name resolve there (DNS rebinding).
"""

import re

from openinfer_server.http.access import Access
from openinfer_server.http.api_errors import ApiError
from openinfer_server.options import ServerOptions

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})  # names that only this machine can reach
_HOST = re.compile(r"\[(?P<v6>[0-9a-fA-F:.]+)\](?::\d+)?|(?P<name>[^:\[\]]+)(?::\d+)?")
_HEADER_NAMES = re.compile(rb"[\w\-, ]{0,1000}", re.ASCII)
_METHODS = b"GET, POST, DELETE"
_MAX_AGE_S = b"600"

Headers = tuple[tuple[bytes, bytes], ...]


class Origins:
    """Checks hosts and answers what CORS asks."""

    def __init__(self, options: ServerOptions, access: Access) -> None:
        self._origins = frozenset(origin.encode() for origin in options.cors_origins)
        # Where keys are asked for, a page that has none gets nothing, whatever host it names.
        alone = options.host in LOOPBACK and not access.asks_for_keys
        self._hosts = LOOPBACK | {host.lower() for host in options.allowed_hosts} if alone else None

    def check_host(self, host: bytes | None) -> None:
        """Refuses a request that was addressed to a name this server does not have."""
        if self._hosts is None or host is None:  # browsers always send it
            return
        match = _HOST.fullmatch(host.decode("latin-1"))
        name = "" if match is None else (match["v6"] or match["name"]).lower()
        if name not in self._hosts:
            message = "this server is for its own machine; to be reached by another name it needs --allowed-hosts NAME"
            raise ApiError(403, message, code="forbidden_host")

    def response_headers(self, origin: bytes | None) -> Headers:
        """What lets a page of an allowed origin read the response."""
        if not self._origins or origin is None:
            return ()
        if b"*" in self._origins:
            return ((b"access-control-allow-origin", b"*"),)
        if origin in self._origins:
            # the answer depends on the origin: a cache must not hand it to a page of another
            return (b"access-control-allow-origin", origin), (b"vary", b"origin")
        return ((b"vary", b"origin"),)

    def preflight(self, origin: bytes | None, method: bytes | None, header_names: bytes | None) -> Headers | None:
        """Headers of the answer to a preflight; None if that is no preflight, or of an origin that may not ask."""
        allowed = self.response_headers(origin)
        if method is None or not any(name == b"access-control-allow-origin" for name, _ in allowed):
            return None
        asked = header_names if header_names and _HEADER_NAMES.fullmatch(header_names) else b"content-type"
        return (
            *allowed,
            (b"access-control-allow-methods", _METHODS),
            (b"access-control-allow-headers", asked),
            (b"access-control-max-age", _MAX_AGE_S),
        )
