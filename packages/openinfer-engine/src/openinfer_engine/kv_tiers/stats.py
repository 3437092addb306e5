"""What is told of tiers: a tier's own counts in the words of the engine, and the sums over ranks."""

from collections import Counter
from collections.abc import Sequence

import msgspec

from openinfer_core.engine import KvTierStats
from openinfer_kv_cache import TierCounters


def stats_of(counted: Sequence[TierCounters]) -> tuple[KvTierStats, ...]:
    return tuple(
        KvTierStats(
            tier=each.tier,
            finds=each.num_finds,
            hit_blocks=each.hit_blocks,
            missed_blocks=each.missed_blocks,
            loaded_blocks=each.loaded_blocks,
            saved_blocks=each.saved_blocks,
            evicted_blocks=each.evicted_blocks,
            corrupt_blocks=each.corrupt_blocks,
            stored_blocks=each.stored_blocks,
            failures={str(reason): count for reason, count in each.failures.items()},
            condition=str(each.condition),
        )
        for each in counted
    )


def total_of_ranks(ranks: Sequence[Sequence[KvTierStats]]) -> tuple[KvTierStats, ...]:
    """Sums tier by tier; a rank that has told of none yet adds nothing."""
    told = [rank for rank in ranks if rank]
    return tuple(map(_total, *told)) if told else ()


def _total(*ranks: KvTierStats) -> KvTierStats:
    names = [name for name in KvTierStats.__struct_fields__ if name not in ("tier", "failures", "condition")]
    failures: Counter[str] = Counter()
    for rank in ranks:
        failures.update(rank.failures)
    sums = {name: sum(getattr(rank, name) for rank in ranks) for name in names}
    condition = next((rank.condition for rank in ranks if rank.condition != "ok"), "ok")
    return msgspec.structs.replace(ranks[0], failures=dict(failures), condition=condition, **sums)
