"""Tiers, pools and scheduler of one engine put together."""

from collections.abc import Sequence

from openinfer_core import Refused
from openinfer_core.errors import ContractViolation
from openinfer_core.scheduling import Scheduler
from openinfer_engine.kv_tiers.choice import OpenTiers
from openinfer_engine.kv_tiers.pool import PoolMemory
from openinfer_engine.kv_tiers.port import PoolTierPort, chunk_blocks_for
from openinfer_engine.kv_tiers.prefault import MemoryPrefault, available_bytes
from openinfer_engine.kv_tiers.share import RankShare
from openinfer_engine.tracing.trace import Tracer
from openinfer_kv_cache import DeviceTier, KvTier, ResidentTier, TieredScheduler

_GIB = 1 << 30


def require_tiered(scheduler: Scheduler, *, name: str, has_states: bool = False) -> TieredScheduler:
    """The scheduler as one that can use tiers, of a model with recurrent states or without.

    Raises:
        Refused: it declares that it cannot.
        ContractViolation: it declares what it has not.
    """
    if not scheduler.capabilities.uses_kv_tiers:
        raise Refused(
            f"--kv-tier: the scheduler {name} uses no KV tiers (it does not declare uses_kv_tiers); leave one of the "
            "two out, or use token-budget"
        )
    if has_states and not scheduler.capabilities.copies_states:
        raise Refused(
            f"--kv-tier: the model keeps recurrent states, and the scheduler {name} plans no copies of them (it does "
            "not declare copies_states), without which a prefix is of no use; use token-budget, or leave --kv-tier out"
        )
    tiered: object = scheduler
    if not isinstance(tiered, TieredScheduler):
        raise ContractViolation(f"the scheduler {name} declares uses_kv_tiers and has no use_tiers(port)")
    return tiered


def begin_prefault(tiers: OpenTiers, *, num_ranks: int = 1) -> MemoryPrefault:
    """Begins to take the memory of tiers that a device is to copy from and to, beside what else a start does.

    Args:
        tiers: of one rank.
        num_ranks: that take as much of this machine's memory.

    Raises:
        Refused: a tier takes no blocks of a device, or the machine has not so much memory.
    """
    memory = _device_tier(tiers.tier).pinnable_memory()
    wanted_bytes, room_bytes = num_ranks * sum(map(len, memory)), available_bytes()
    if room_bytes is not None and wanted_bytes > room_bytes:
        raise Refused(
            f"--kv-tier: tiers in memory want {wanted_bytes / _GIB:.1f} GiB, which a GPU's copies need at once, and "
            f"{room_bytes / _GIB:.1f} GiB are available; give them less"
        )
    return MemoryPrefault(memory)


def open_port(
    tiers: OpenTiers,
    *,
    pool: PoolMemory,
    load_timeout_s: float,
    shares: Sequence[RankShare] = (),
    tracer: Tracer | None = None,
) -> PoolTierPort:
    """The port of one rank's open tiers, which it owns; `shares` are those of the other ranks, on rank 0.

    Raises:
        Refused: a tier takes no blocks of the pool's device, or cannot have its memory there.
        ContractViolation: pool and tiers have blocks of different sizes.
    """
    block_bytes = tiers.tier.layout.block_bytes
    if pool.blocks[0].nbytes != block_bytes:
        raise ContractViolation(f"blocks of the pool have {pool.blocks[0].nbytes} bytes, those of tiers {block_bytes}")
    if pool.is_on_device:
        pool.lock(_device_tier(tiers.tier).pinnable_memory())
    if isinstance(tiers.tier, ResidentTier):
        try:
            tiers.tier.use_memory(pool.source)
        except Exception as error:
            raise Refused(f"--kv-tier: {tiers.tier.name} cannot have its memory: {error}") from error
    return PoolTierPort(
        tiers.tier,
        pool.blocks,
        states=pool.states,
        shares=shares,
        load_timeout_s=load_timeout_s,
        chunk_blocks=chunk_blocks_for(block_bytes),
        before_close=pool.unlock,
        tracer=tracer,
    )


def _device_tier(tier: KvTier) -> DeviceTier:
    if not (isinstance(tier, DeviceTier) and tier.takes_device_blocks):
        raise Refused(f"--kv-tier: {tier.name} copies blocks of this machine's memory only; use it with --device cpu")
    return tier
