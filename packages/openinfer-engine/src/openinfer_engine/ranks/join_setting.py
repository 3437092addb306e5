"""What follows `--rank-host join=`, and addresses as people write them."""

import socket
from pathlib import Path
from typing import Self

import msgspec

from openinfer_core import InvalidRequest

_MAX_RANKS = 1024
_MAX_WAIT_S = 7 * 86_400
_FORM = "HOST:PORT,token-file=FILE[,local=N][,node=NAME][,wait-s=N]"


class JoinSetting(msgspec.Struct, frozen=True, kw_only=True):
    """Where ranks join, and how many are on the head's own node."""

    host: str
    port: int
    token_file: Path
    local: int = 1
    node: str
    wait_s: int = 600

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads a setting; raises `InvalidRequest`, with the form that it must have."""
        address, *rest = text.split(",")
        given = {name: value for name, _, value in (each.partition("=") for each in rest)}
        unknown = given.keys() - {"token-file", "local", "node", "wait-s"}
        if unknown or len(given) != len(rest) or not given.get("token-file"):
            raise _wrong(f"{text!r} is not of the form {_FORM}")
        host, port = parse_address(address, field="rank_host")
        return cls(
            host=host,
            port=port,
            token_file=Path(given["token-file"]),
            local=_number(given.get("local", "1"), "local", 1, _MAX_RANKS),
            node=given.get("node") or socket.gethostname(),
            wait_s=_number(given.get("wait-s", "600"), "wait-s", 1, _MAX_WAIT_S),
        )


def parse_address(text: str, *, field: str) -> tuple[str, int]:
    """`10.0.0.1:7000`, `head:7000` or `[fd00::1]:7000`; raises `InvalidRequest`."""
    host, colon, port = text.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not host or not port.isascii() or not port.isdigit() or not 0 <= int(port) <= 65535:
        raise InvalidRequest(f"{text!r} is not HOST:PORT", field=field)
    return host, int(port)


def _number(text: str, name: str, low: int, high: int) -> int:
    if not (text.isascii() and text.isdigit() and low <= int(text) <= high):
        raise _wrong(f"{name} is {text!r}; it must be a number from {low} to {high}")
    return int(text)


def _wrong(message: str) -> InvalidRequest:
    return InvalidRequest(f"--rank-host join: {message}", field="rank_host")
