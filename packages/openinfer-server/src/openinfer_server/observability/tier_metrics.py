"""The part of `/metrics` that is of KV tiers: what the engine says of all of them, and samples for each."""

from collections.abc import Iterator

from openinfer_core.engine import EngineStats
from openinfer_server.observability.exposition import Sample, render_family

_OF_EACH = (
    ("openinfer_kv_tier_finds_total", "counter", "Times it was asked for a chain of blocks.", "finds"),
    ("openinfer_kv_tier_hit_blocks_total", "counter", "Blocks that were found.", "hit_blocks"),
    ("openinfer_kv_tier_missed_blocks_total", "counter", "Blocks that were asked for and not found.", "missed_blocks"),
    ("openinfer_kv_tier_loaded_blocks_total", "counter", "Blocks brought into the pool.", "loaded_blocks"),
    ("openinfer_kv_tier_saved_blocks_total", "counter", "Blocks taken from it.", "saved_blocks"),
    ("openinfer_kv_tier_evicted_blocks_total", "counter", "Blocks given up for space or age.", "evicted_blocks"),
    ("openinfer_kv_tier_corrupt_blocks_total", "counter", "Blocks dropped for their checksum.", "corrupt_blocks"),
    ("openinfer_kv_tier_stored_blocks", "gauge", "Blocks held.", "stored_blocks"),
)


def tier_lines(stats: EngineStats) -> Iterator[str]:
    """Lines of what the engine says of its KV tiers."""
    for name, kind, text, value in (
        ("openinfer_kv_tier_tokens_total", "counter", "Tokens that KV tiers had.", stats.tier_tokens),
        ("openinfer_kv_tier_loading", "gauge", "Sequences whose prefix is on its way.", stats.loading),
        (
            "openinfer_kv_tier_unsaved_blocks_total",
            "counter",
            "Blocks that tiers were not given.",
            stats.unsaved_blocks,
        ),
        ("openinfer_kv_tier_faults_total", "counter", "Times a tier raised.", stats.kv_tier_faults),
    ):
        yield from render_family(name, kind, text, [((), value)])
    for name, kind, text, field in _OF_EACH:
        samples: list[Sample] = [((("tier", tier.tier),), getattr(tier, field)) for tier in stats.kv_tiers]
        yield from render_family(name, kind, text, samples)
    failures: list[Sample] = [
        ((("tier", tier.tier), ("reason", reason)), count)
        for tier in stats.kv_tiers
        for reason, count in sorted(tier.failures.items())
    ]
    text = "Transfers that fell short."
    yield from render_family("openinfer_kv_tier_failures_total", "counter", text, failures)
