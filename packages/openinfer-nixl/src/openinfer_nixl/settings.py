"""The tier from what a user writes: `nixl=0.0.0.0:7600,64GiB,token_file=FILE,peers=10.0.0.8:7600`."""

import socket
import time
from collections.abc import Callable
from pathlib import Path

from openinfer_core import InvalidRequest
from openinfer_core.process.addresses import parse_address
from openinfer_core.process.mutual_proof import read_token
from openinfer_kv_cache import KvLayout
from openinfer_kv_offload import RemoteTier, RemoteTierOptions, StoreError, TierConfigError, parse_size
from openinfer_kv_offload.format.record import HEADER_BYTES
from openinfer_kv_offload.setting_fields import TierOpener, convert, parse_fields
from openinfer_kv_offload.transfer.memory import WrapMedium, as_it_is
from openinfer_nixl.agent import Agent, NixlAgent
from openinfer_nixl.arena import Arena
from openinfer_nixl.directory import Directory
from openinfer_nixl.peers import Peer
from openinfer_nixl.store import NixlStore

OPENINFER_CONTRACT = 1

_EXAMPLE = "nixl=0.0.0.0:7600,64GiB,token_file=token,peers=10.0.0.8:7600+10.0.0.9:7600"
_NUM_OTHERS = 8  # slots for the manifest, and for what is leased while it is given up
_MOST_PEERS = 64


class NixlFields(RemoteTierOptions, frozen=True, kw_only=True):
    """Options of the tier.

    Raises:
        TierConfigError: a field is out of range.
    """

    listen: str
    """Address of this engine's directory."""
    token_file: str
    """The secret that all peers have."""
    peers: str = ""
    """Addresses of the others' directories, with + between them."""
    timeout_s: float = 5.0
    """Of connecting, of an answer, and of a block on its way."""
    lease_s: float = 30.0
    """For which a peer's block stays where it is while it is read."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("timeout_s", "lease_s"):
            if not 0.001 <= getattr(self, name) <= 86_400:  # also refuses NaN
                raise TierConfigError(f"{name} is {getattr(self, name)}; it must be between 0.001 and 86400")
        if len(self.peer_addresses) > _MOST_PEERS:
            raise TierConfigError(f"{len(self.peer_addresses)} peers are named; at most {_MOST_PEERS} are possible")
        _address(self.listen)

    @property
    def peer_addresses(self) -> tuple[tuple[str, int], ...]:
        return tuple(_address(text) for text in self.peers.split("+") if text)


def _address(text: str) -> tuple[str, int]:
    try:
        return parse_address(text, field="kv_tier")
    except InvalidRequest as error:
        raise TierConfigError(f"{error}; write for example {_EXAMPLE}") from error


def parse(setting: str) -> NixlFields:
    """What a setting says; raises `TierConfigError`."""
    listen, *rest = setting.split(",")
    if not rest:
        raise TierConfigError(f"{setting!r} needs an address and a size; write for example {_EXAMPLE}")
    given = parse_fields({"listen": listen, "budget_bytes": parse_size(rest[0])}, rest[1:])
    if "token_file" not in given:
        raise TierConfigError(f"{setting!r} has no token_file; write for example {_EXAMPLE}")
    return convert(given, NixlFields)


def open_with(
    layout: KvLayout,
    fields: NixlFields,
    make_agent: Callable[[int, int], Agent],
    *,
    wrap_medium: WrapMedium = as_it_is,
) -> RemoteTier:
    """Opens the tier; what moves bytes is made for the address and size of its memory."""
    try:
        token = read_token(Path(fields.token_file), field="kv_tier")
    except InvalidRequest as error:
        raise TierConfigError(f"token_file: {error}") from error
    slot_bytes = HEADER_BYTES + layout.block_bytes
    num_slots = fields.budget_bytes // slot_bytes + _NUM_OTHERS
    arena = Arena(num_slots, slot_bytes, num_landings=fields.connections, lease_s=fields.lease_s, clock=time.monotonic)
    listener = _listen(fields.listen)
    try:
        agent = make_agent(arena.address, arena.num_bytes)
    except BaseException:
        listener.close()
        raise
    directory = Directory(listener, arena, token=token, layout=layout.digest, description=agent.describe())
    peers = [
        Peer(address, agent, token=token, layout=layout.digest, timeout_s=fields.timeout_s)
        for address in fields.peer_addresses
    ]
    store = NixlStore(
        arena, directory, peers, agent, timeout_s=fields.timeout_s, address=f"{fields.listen} ({directory.port})"
    )
    try:
        return RemoteTier(layout, store, fields, name="nixl", wrap_medium=wrap_medium)
    except BaseException:
        store.close()
        raise


def _listen(text: str) -> socket.socket:
    host, port = _address(text)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise StoreError(f"nixl cannot listen at {text}: {error}") from error


def _open(layout: KvLayout, fields: NixlFields) -> RemoteTier:
    return open_with(layout, fields, NixlAgent)


# `HOST:PORT,SIZE,token_file=FILE[,peers=HOST:PORT+HOST:PORT][,timeout_s=S][,lease_s=S]`, and `RemoteTierOptions`.
open_nixl = TierOpener(parse, _open)
