"""Where the tokens of one step stand."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from openinfer_kernels.ops.arrays import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptInputs:
    """What the tokens of some rows would change recurrent states by, kept until it is known which tokens count.

    `S` state slots, `L` layers; of each slot the tokens of the last such row, up to `M`.
    """

    conv_inputs: Array
    """`[S, L, M, C]` what the convolution was given."""
    keys_values: Array
    """`[S, L, M, Hk dk + N dv]` keys and values as the rule was given them."""
    gates: Array
    """`[S, L, M, N, 2]` float32: the logarithm of the decay, and beta."""

    @property
    def most_tokens(self) -> int:
        """`M`"""
        return int(self.gates.shape[2])


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBatch:
    """Where the tokens of one step stand. A chunk of a prompt and a decode row are the same kind of row.

    The tokens of row `r` are `query_starts[r] : query_starts[r + 1]`, at least one, with consecutive
    positions; the last one has position `context_lens[r] - 1`. No row's context holds a token that another row of
    this step appends. Arrays are on the device; the plain integers are known to the host.
    """

    positions: Array
    """`[T]` position of each token in its sequence, from 0."""
    query_starts: Array
    """`[R + 1]` first token of each row, then T."""
    context_lens: Array
    """`[R]` tokens in the cache of each row once this step's have been appended."""
    block_tables: tuple[Array, ...]
    """Of each block table (`PagedCache.table`), `[R, max_blocks]`: KV block of each B tokens of the row's context;
    unused entries are any block's id. Layers that look back alike share a table, so most models have one.

    What a cache holds beyond a row's context (in blocks it does not use, or after the last token of its last block)
    may be anything, NaN included, and never changes a result. Nor do entries of blocks before the window of a layer's
    attention: they may be any numbers.
    """
    cache_slots: tuple[Array, ...]
    """Of each block table, `[T]` int64, block id * B + offset: where each token's K and V are written; below 0, for
    padding, nowhere. A token is padding in all of them or in none."""
    max_query_tokens: int
    """Largest number of tokens in one row."""
    newest_tokens: int = 1
    """Of the last so many tokens of a context some may be appended by this step for other rows than its own: more than
    one where several rows are of one sequence, each of whose tokens is a row. What is before them is there already."""
    token_rows: "AttentionBatch | None" = None
    """The same tokens as rows of one each, which attention over keys and values may go by instead; None where that is
    slower."""
    max_context_tokens: int
    """Largest entry of `context_lens`."""
    chunk_context_tokens: int | None = None
    """Sum of `context_lens` over the rows of several tokens, at least; None where the host does not know them, as in a
    captured step. What is made per token of a context finds its room by it."""
    state_slots: Array | None = None
    """`[R]` slot of each row's recurrent states; None for a model that has none.

    What a slot holds when a row begins at position 0 may be anything, NaN included, and never changes a result.
    """
    states: Mapping[str, Array] = field(default_factory=dict[str, Array])
    """Name -> `[slots, layers, *shape]`: all recurrent states of this rank; operators change those of their rows.

    Each layer of a slot is a contiguous piece; layers and slots may lie further apart.
    """
    kept: KeptInputs | None = None
    """Where inputs of the rows that `kept_rows` names are kept; None where states take in all tokens."""
    kept_rows: Array | None = None
    """`[R]` int32, 1 for a row whose tokens may not count, of `kept.most_tokens` at most and after its sequence's
    first: its states stay what they are, and its inputs are kept. Given with `kept`."""
    block_tokens: int = 0
    """`B`; told to operators whose caches have fewer rows than tokens. 0 where no operator of the model asks."""
    caches: Mapping[str, Array] = field(default_factory=dict[str, Array])
    """Name -> `[blocks, layers, heads, rows, dim]`: paged tensors of a model whose blocks are no dense array."""
    adapter_slots: Array | None = None
    """`[T]` int32 slot of each token's low-rank adapter, below 0 for none; None where no token has one, and then
    products are what they are without adapters, at no cost."""
