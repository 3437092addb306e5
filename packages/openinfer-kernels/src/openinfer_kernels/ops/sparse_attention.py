"""Attention over a window and compressed entries, where one vector per token is key and value of all heads.

Entry `w` of ratio `m` stands for tokens `m w .. m (w + 1) - 1` (and those before them, where windows overlap). It is
made by the token that completes them, and seen from that token on. Its row is in the block of that token: the row that
ends at a block's token `t` is row `t // m` of the block (`KvLayout`, `tokens_per_row`).

RoPE here rotates the last `r` dimensions of each vector, in pairs `(2 i, 2 i + 1)`: Su et al. 2021, eq. 34.
"""

from dataclasses import dataclass
from typing import Protocol

from openinfer_kernels.ops.arrays import Array
from openinfer_kernels.ops.batch import AttentionBatch
from openinfer_kernels.ops.quantised import LinearWeight


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedEntries:
    """The compressed entries that one layer attends to."""

    cache: Array
    """`[blocks, layers, 1, rows, D]`"""
    layer: int
    """Index into the layer axis."""
    ratio: int
    """Tokens per entry."""
    selected: Array | None = None
    """`[T, k]` int32, which entries each token sees, -1 for none; None for all that it can see."""


class SparseAttentionOps(Protocol):
    """Attention over a window and compressed entries: the operators of one layer, in the order of their use.

    `D` is the dimension of a key, `W` the tokens of the window, `batch.block_tokens` the tokens of a block.
    """

    def norm_rope_tail(
        self, x: Array, weight: Array | None, *, eps: float, rope: Array, batch: AttentionBatch
    ) -> Array:
        """RMSNorm of each vector, then RoPE of its last dimensions: `[T, n, d]`.

        Args:
            x: `[T, n, d]`.
            weight: `[d]`; None is a norm without one.
            eps: of the norm.
            rope: `[2, positions, r / 2]` float32, cosines then sines.
            batch: positions of the tokens.
        """
        ...

    def rope_tail(self, x: Array, *, rope: Array, batch: AttentionBatch) -> Array:
        """RoPE of the last dimensions of each vector of `x [T, n, d]`: `[T, n, d]`; `rope` as above."""
        ...

    def compress_windows(
        self,
        projected: Array,
        *,
        ape: Array,
        norm: Array,
        eps: float,
        rope: Array,
        state: Array,
        cache: Array,
        layer: int,
        batch: AttentionBatch,
    ) -> None:
        """Appends the entries that this step's tokens complete; each is a mean of its window's values.

        Per channel: `e = sum_t softmax_t(z_t + ape[t]) c_t` over the `m` tokens of a window, then RMSNorm with `norm`,
        then RoPE at the window's first position. All in float32.

        Args:
            projected: `[T, 2 d]` float32, `c` then `z`.
            ape: `[m, d]` float32, added to `z` by position in the window.
            norm: `[d]`.
            eps: of the norm.
            rope: `[2, positions, r / 2]` float32.
            state: `[slots, layers, 3, d]` float32, of each open window the largest `z`, the sum of weights and of
                weighted values; mutated: those of `batch.state_slots` in this layer.
            cache: `[blocks, layers, 1, rows, d]`, mutated.
            layer: index into both layer axes.
            batch: rows of any length.
        """
        ...

    def compress_overlapping_windows(
        self,
        projected: Array,
        *,
        ape: Array,
        norm: Array,
        eps: float,
        rope: Array,
        state: Array,
        cache: Array,
        layer: int,
        batch: AttentionBatch,
    ) -> None:
        """As `compress_windows`, but an entry is a mean over `2 m` tokens: its window's and those of the one before.

        Each token has two values and two weights per channel: the first half counts for the window after its own, the
        second for its own. The first window has none before it.

        Args:
            projected: `[T, 4 d]` float32, `c` of both halves, then `z`.
            ape: `[m, 2 d]` float32.
            norm: `[d]`.
            eps: of the norm.
            rope: `[2, positions, r / 2]` float32.
            state: `[slots, layers, 2 m, 4 d]` float32, `c` and `z + ape` of the last `2 m` tokens, that of position `p`
                in row `p % (2 m)`; mutated.
            cache: `[blocks, layers, 1, rows, d]`, mutated.
            layer: index into both layer axes.
            batch: rows of any length.
        """
        ...

    def index_scores(
        self,
        queries: Array,
        weights: Array,
        *,
        cache: Array,
        layer: int,
        ratio: int,
        scale: float,
        batch: AttentionBatch,
    ) -> Array:
        """How much each token wants to see each entry: `[T, E]` float32, -inf for those it cannot see.

        `score = sum_h weights[h] relu(scale q_h . key)`: of this rank's heads, so that ranks add theirs. `E` is
        `max(1, batch.max_context_tokens // ratio)`.

        Args:
            queries: `[T, Hi, di]`.
            weights: `[T, Hi]` float32.
            cache: `[blocks, layers, 1, rows, di]`, the entries' index keys.
            layer: index into the layer axis.
            ratio: tokens per entry.
            scale: multiplies the products.
            batch: rows of any length.
        """
        ...

    def select_entries(self, scores: Array, k: int) -> Array:
        """The `k` entries of the largest `scores [T, E]` of each token, ascending: `[T, k]` int32; -1 after the last.

        Of equals the first ones are taken; one of -inf never.
        """
        ...

    def window_attention(
        self,
        q: Array,
        kv: Array,
        *,
        sinks: Array,
        window: Array,
        layer: int,
        entries: CompressedEntries | None,
        rope: Array,
        scale: float,
        batch: AttentionBatch,
        num_seen: int | None = None,
        first_key: int = 0,
    ) -> Array:
        """Attention of each token to the last `W` tokens, itself among them, and to compressed entries: `[T, H D]`.

        All heads share one key per token and per entry, which is the value, too. `P = exp(s - m) / (sum exp(s - m) +
        exp(sink_h - m))`. RoPE is taken back from the last dimensions of the result, by the position of the token.

        Args:
            q: `[T, H, D]`, rotated.
            kv: `[T, D]` of this step's tokens, rotated.
            sinks: `[H]` float32.
            window: `[slots, layers, W, D]`, the last `W` tokens of each sequence, that of position `p` in row `p % W`;
                mutated: this step's are written once all have attended.
            layer: index into the layer axis of `window`.
            entries: those of this layer; None in a layer that has none.
            rope: `[2, positions, r / 2]` float32.
            scale: multiplies the scores.
            batch: rows of any length.
            num_seen: tokens that one sees, itself among them, of a window that has room for more; None: `W`. What is
                written at later positions then replaces none that a token at an earlier one sees.
            first_key: the first position that has a key; a token that sees none at all gets zeros.
        """
        ...

    def append_window(self, kv: Array, *, window: Array, layer: int, batch: AttentionBatch) -> None:
        """Writes this step's `kv [T, D]` into a window as `window_attention` does; nothing attends."""
        ...

    def grouped_linear(self, x: Array, weight: LinearWeight) -> Array:
        """Piece `g` of each row of `x [T, G in]` times matrix `g` of `weight [G, out, in]`: `[T, G out]`."""
        ...
