"""Where an engine says what it has, and whom it asks: what the settings of both tiers have in common."""

import socket
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from openinfer_core import InvalidRequest
from openinfer_core.process.addresses import parse_address
from openinfer_core.process.mutual_proof import read_token
from openinfer_kv_offload import StoreError, TierConfigError, parse_size
from openinfer_kv_offload.setting_fields import convert, parse_fields

_EXAMPLE = "0.0.0.0:7600,64GiB,token_file=token,peers=10.0.0.8:7600+10.0.0.9:7600"
_MOST_PEERS = 64
Fields = TypeVar("Fields", bound=msgspec.Struct)


class Reach(Protocol):
    """Fields of a tier's setting."""

    @property
    def listen(self) -> str: ...

    @property
    def peers(self) -> str: ...

    @property
    def timeout_s(self) -> float: ...

    @property
    def lease_s(self) -> float: ...


def check_reach(fields: Reach) -> None:
    """Raises `TierConfigError` if one is out of range."""
    for name, value in (("timeout_s", fields.timeout_s), ("lease_s", fields.lease_s)):
        if not 0.001 <= value <= 86_400:  # also refuses NaN
            raise TierConfigError(f"{name} is {value}; it must be between 0.001 and 86400")
    num_peers = len(addresses_in(fields.peers))
    if num_peers > _MOST_PEERS:
        raise TierConfigError(f"{num_peers} peers are named; at most {_MOST_PEERS} are possible")
    _address(fields.listen)


def addresses_in(peers: str) -> tuple[tuple[str, int], ...]:
    return tuple(_address(text) for text in peers.split("+") if text)


def parse_reach(setting: str, kind: type[Fields]) -> Fields:
    """What `HOST:PORT,SIZE,token_file=FILE[,NAME=VALUE...]` says; raises `TierConfigError`."""
    listen, *rest = setting.split(",")
    if not rest:
        raise TierConfigError(f"{setting!r} needs an address and a size; write for example {_EXAMPLE}")
    given = parse_fields({"listen": listen, "budget_bytes": parse_size(rest[0])}, rest[1:])
    if "token_file" not in given:
        raise TierConfigError(f"{setting!r} has no token_file; write for example {_EXAMPLE}")
    return convert(given, kind)


def read_tier_token(token_file: str) -> bytes:
    try:
        return read_token(Path(token_file), field="kv_tier")
    except InvalidRequest as error:
        raise TierConfigError(f"token_file: {error}") from error


def listen_at(text: str) -> socket.socket:
    host, port = _address(text)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise StoreError(f"nixl cannot listen at {text}: {error}") from error


def _address(text: str) -> tuple[str, int]:
    try:
        return parse_address(text, field="kv_tier")
    except InvalidRequest as error:
        raise TierConfigError(f"{error}; write for example {_EXAMPLE}") from error
