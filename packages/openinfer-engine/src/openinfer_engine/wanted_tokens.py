"""Which tokens of a step somebody asks about: of a prompt's piece, only the last one is sampled from.

A model may leave out what its last layer would compute for the others, beside their keys and values: 2 % of a prompt.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from openinfer_kernels import Array, AttentionBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedTokens:
    """Tokens whose hidden states will be read, each the last one of its row."""

    tokens: Array
    """`[n]` int32, ascending places in the step; n may be 0."""
    batch: AttentionBatch
    """Where they stand: n rows of one token each. Of no use where n is 0."""


@runtime_checkable
class SelectiveModel(Protocol):
    """A `Model` that can leave out what nobody asks about."""

    def forward_wanted(
        self, token_ids: Array, *, batch: AttentionBatch, kv_cache: Array, wanted: WantedTokens
    ) -> Array:
        """As `Model.forward`, but for the wanted tokens alone: `[n, h]`."""
        ...
