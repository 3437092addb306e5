"""Addresses of sockets, as users write them."""

from openinfer_core.errors import InvalidRequest

_LARGEST_PORT = 65535


def parse_address(text: str, *, field: str) -> tuple[str, int]:
    """`10.0.0.1:7000`, `head:7000` or `[fd00::1]:7000`; raises `InvalidRequest`."""
    host, colon, port = text.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > _LARGEST_PORT:
        raise InvalidRequest(f"{text!r} is not HOST:PORT", field=field)
    return host, int(port)
