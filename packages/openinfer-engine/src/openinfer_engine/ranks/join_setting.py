"""What follows `--rank-host join=`."""

import socket
from pathlib import Path
from typing import Self

import msgspec

from openinfer_core import InvalidRequest
from openinfer_core.process.addresses import parse_address

_MAX_RANKS = 1024
_MAX_WAIT_S = 7 * 86_400
_FORM = "HOST:PORT,token-file=FILE[,local=N][,node=NAME][,wait-s=N]"


class HeadSetting(msgspec.Struct, frozen=True, kw_only=True):
    """Where ranks join, and how many are on the head's own node."""

    host: str
    port: int  # 0: the system chooses
    local: int = 1
    node: str
    wait_s: int = 600


class JoinSetting(HeadSetting, frozen=True, kw_only=True):
    """What `--rank-host join=` says: all of that, and where the secret is."""

    token_file: Path

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


def _number(text: str, name: str, low: int, high: int) -> int:
    if not (text.isascii() and text.isdigit() and low <= int(text) <= high):
        raise _wrong(f"{name} is {text!r}; it must be a number from {low} to {high}")
    return int(text)


def _wrong(message: str) -> InvalidRequest:
    return InvalidRequest(f"--rank-host join: {message}", field="rank_host")
