"""`CacheTables`: the block tables of a request in vLLM, one per KV cache group, and what a prefix needs of each.

vLLM's groups of a hybrid model share one pool of blocks. A request has blocks of each group position by position;
where no later token of a group's layers sees a block (`SlidingWindowSpec`), the null block stands in its place. Tables
are the groups in our order: those of full attention first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from openinfer_kv_cache.windows import first_visible_block
from openinfer_kv_offload.errors import TierConfigError
from openinfer_kv_offload.vllm.host import VLLM_VERSION, TransferResults

_WHOLE_PREFIX_SPECS = ("FullAttentionSpec", "MLAAttentionSpec", "TQFullAttentionSpec")
_WINDOW_SPEC = "SlidingWindowSpec"


@dataclass(frozen=True, slots=True)
class CacheTables:
    """What both sides of a connector know of a model's KV cache groups."""

    block_tokens: int
    groups: tuple[int, ...]
    """By table: vLLM's group."""
    layer_names: tuple[tuple[str, ...], ...]
    """By table."""
    windows: tuple[int | None, ...]
    """By table: tokens that a token sees, its own among them; None: all."""

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def whole(self) -> range:
        """The tables that keep every block."""
        return range(sum(window is None for window in self.windows))

    def first_block(self, table: int, num_blocks: int) -> int:
        """The first block that a token after `num_blocks` full ones sees."""
        return first_visible_block(num_blocks * self.block_tokens, self.windows[table], self.block_tokens)

    def of_groups(self, by_group: Sequence[Sequence[int]]) -> list[list[int]]:
        """What vLLM has by group, such as block ids, by table."""
        return [list(by_group[group]) for group in self.groups]


def read_groups(kv_cache_groups: Sequence[Any]) -> CacheTables:
    """Raises `TierConfigError` for groups that the connector does not serve."""
    # By name, not by `isinstance`: vLLM's RSWASpec and SinkFullAttentionSpec, and what others derive from its
    # FullAttentionSpec, leave gaps in a request's blocks, where the n-th block is not that of the n-th tokens.
    names = [type(group.kv_cache_spec).__name__ for group in kv_cache_groups]
    if any(name not in (*_WHOLE_PREFIX_SPECS, _WINDOW_SPEC) for name in names) or all(
        name == _WINDOW_SPEC for name in names
    ):
        raise TierConfigError(
            f"OpenInferConnector serves models with a group of full attention ({', '.join(_WHOLE_PREFIX_SPECS)}), "
            f"which keeps every block of a prefix, and beside it others and groups of {_WINDOW_SPEC}; this has {names}"
        )
    if len(names) > 1 and TransferResults is None:
        raise TierConfigError(
            f"vLLM {VLLM_VERSION} cannot compute again what did not arrive of a model with {len(names)} KV cache "
            f"groups ({names}); use a release that has KVConnectorTransferResults, or --disable-hybrid-kv-cache-manager"
        )
    sizes = sorted({group.kv_cache_spec.block_size for group in kv_cache_groups})
    if len(sizes) > 1:
        raise TierConfigError(
            f"OpenInferConnector serves KV cache groups with blocks of one size; these have {sizes} tokens"
        )
    order = sorted(range(len(names)), key=lambda group: names[group] == _WINDOW_SPEC)
    specs = [kv_cache_groups[group].kv_cache_spec for group in order]
    return CacheTables(
        block_tokens=sizes[0],
        groups=tuple(order),
        layer_names=tuple(tuple(kv_cache_groups[group].layer_names) for group in order),
        windows=tuple(
            spec.sliding_window if names[group] == _WINDOW_SPEC else None
            for group, spec in zip(order, specs, strict=True)
        ),
    )
