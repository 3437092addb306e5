"""The tier from what a user writes: `nixl-gpu=0.0.0.0:7700,4GiB,token_file=FILE,peers=10.0.0.8:7700`."""

import msgspec

from openinfer_kv_cache import KvLayout
from openinfer_kv_offload import TierConfigError
from openinfer_kv_offload.setting_fields import TierOpener
from openinfer_kv_offload.transfer.memory import WrapMedium, as_it_is
from openinfer_nixl.agent import NixlAgent, import_nixl
from openinfer_nixl.gpu.tier import GpuTier, GpuTierOptions, MakeAgent
from openinfer_nixl.reach import addresses_in, check_reach, listen_at, parse_reach, read_tier_token

OPENINFER_CONTRACT = 1

_MOST_CONNECTIONS = 64


class GpuFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the tier.

    Raises:
        TierConfigError: a field is out of range.
    """

    listen: str
    """Address of this engine's directory."""
    budget_bytes: int
    """Of the GPU's memory, for blocks."""
    token_file: str
    """The secret that all peers have."""
    peers: str = ""
    """Addresses of the others' directories, with + between them."""
    timeout_s: float = 5.0
    """Of connecting, of an answer, and of a batch of blocks on its way."""
    lease_s: float = 30.0
    """For which a peer's blocks stay where they are while they are read."""
    connections: int = 2
    """Batches of blocks that move at the same time, each of which has a place to land. Two keep the link between two
    H200s as busy as four (162 and 166 GB/s), and save and load one's own quicker, in half of the memory: while one is
    copied on, the other is on its way. Loads are served in their order, so more share the link no more evenly."""

    def __post_init__(self) -> None:
        check_reach(self)
        if not 1 <= self.connections <= _MOST_CONNECTIONS:
            raise TierConfigError(f"connections is {self.connections}; it must be 1 to {_MOST_CONNECTIONS}")


def parse(setting: str) -> GpuFields:
    """What a setting says; raises `TierConfigError`."""
    return parse_reach(setting, GpuFields)


def open_with(
    layout: KvLayout, fields: GpuFields, make_agent: MakeAgent, *, wrap_medium: WrapMedium = as_it_is
) -> GpuTier:
    """Opens the tier, which has no memory yet; what moves bytes is made for its memory."""
    options = GpuTierOptions(
        budget_bytes=fields.budget_bytes,
        peers=addresses_in(fields.peers),
        timeout_s=fields.timeout_s,
        lease_s=fields.lease_s,
        connections=fields.connections,
    )
    token = read_tier_token(fields.token_file)
    listener = listen_at(fields.listen)
    try:
        return GpuTier(layout, options, listener, token=token, make_agent=make_agent, wrap_medium=wrap_medium)
    except BaseException:
        listener.close()
        raise


def _open(layout: KvLayout, fields: GpuFields) -> GpuTier:
    import_nixl()  # said before an engine has loaded its weights
    return open_with(layout, fields, NixlAgent)


# `HOST:PORT,SIZE,token_file=FILE[,peers=HOST:PORT+HOST:PORT][,timeout_s=S][,lease_s=S][,connections=N]`.
open_nixl_gpu = TierOpener(parse, _open)
