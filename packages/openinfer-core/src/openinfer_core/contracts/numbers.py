"""The numbers themselves, as data. `docs/reference/public-api.md` says when one goes up."""

from collections.abc import Mapping
from types import MappingProxyType

CONTRACTS: Mapping[str, int] = MappingProxyType(
    {
        "openinfer.benches": 1,
        "openinfer.checkpoints": 1,
        "openinfer.commands": 1,
        "openinfer.drafters": 1,
        "openinfer.endpoints": 1,
        "openinfer.grammar_compilers": 1,
        "openinfer.kernel_providers": 1,
        "openinfer.kv_tiers": 1,
        "openinfer.model_files": 1,
        "openinfer.models": 1,
        "openinfer.queue_policies": 1,
        "openinfer.rank_hosts": 1,
        "openinfer.reasoning_parsers": 1,
        "openinfer.schedulers": 1,
        "openinfer.tokenizers": 1,
        "openinfer.tool_parsers": 1,
    }
)
"""Group of entry points -> the number of its contract. A group that is not here is another project's: it has none."""
