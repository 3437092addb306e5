"""The tier from what a user writes: `nixl=0.0.0.0:7600,64GiB,token_file=FILE,peers=10.0.0.8:7600`."""

import time
from collections.abc import Callable

from openinfer_kv_cache import KvLayout
from openinfer_kv_offload import RemoteTier, RemoteTierOptions
from openinfer_kv_offload.format.record import HEADER_BYTES
from openinfer_kv_offload.setting_fields import TierOpener
from openinfer_kv_offload.transfer.memory import WrapMedium, as_it_is
from openinfer_nixl.agent import Agent, NixlAgent
from openinfer_nixl.arena import Arena
from openinfer_nixl.directory import ArenaOffer, Directory
from openinfer_nixl.messages import answers
from openinfer_nixl.peers import Peer, PeerConnection
from openinfer_nixl.reach import addresses_in, check_reach, listen_at, parse_reach, read_tier_token
from openinfer_nixl.store import NixlStore

OPENINFER_CONTRACT = 1

_NUM_OTHERS = 8  # slots for the manifest, and for what is leased while it is given up


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
        check_reach(self)

    @property
    def peer_addresses(self) -> tuple[tuple[str, int], ...]:
        return addresses_in(self.peers)


def parse(setting: str) -> NixlFields:
    """What a setting says; raises `TierConfigError`."""
    return parse_reach(setting, NixlFields)


def open_with(
    layout: KvLayout,
    fields: NixlFields,
    make_agent: Callable[[int, int], Agent],
    *,
    wrap_medium: WrapMedium = as_it_is,
) -> RemoteTier:
    """Opens the tier; what moves bytes is made for the address and size of its memory."""
    token = read_tier_token(fields.token_file)
    slot_bytes = HEADER_BYTES + layout.block_bytes
    num_slots = fields.budget_bytes // slot_bytes + _NUM_OTHERS
    arena = Arena(num_slots, slot_bytes, num_landings=fields.connections, lease_s=fields.lease_s, clock=time.monotonic)
    listener = listen_at(fields.listen)
    try:
        agent = make_agent(arena.address, arena.num_bytes)
    except BaseException:
        listener.close()
        raise
    offer = ArenaOffer(arena)
    directory = Directory(listener, offer, token=token, layout=layout.digest, description=agent.describe())
    peers = [
        Peer(PeerConnection(address, agent, answers, token=token, layout=layout.digest, timeout_s=fields.timeout_s))
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


def _open(layout: KvLayout, fields: NixlFields) -> RemoteTier:
    return open_with(layout, fields, NixlAgent)


# `HOST:PORT,SIZE,token_file=FILE[,peers=HOST:PORT+HOST:PORT][,timeout_s=S][,lease_s=S]`, and `RemoteTierOptions`.
open_nixl = TierOpener(parse, _open)
