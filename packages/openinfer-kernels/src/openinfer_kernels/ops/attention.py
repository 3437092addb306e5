"""Full attention over a paged cache of keys and values."""

from typing import Protocol

from openinfer_kernels.ops.arrays import Array
from openinfer_kernels.ops.batch import AttentionBatch
from openinfer_kernels.ops.cache import PagedCache


class AttentionOps(Protocol):
    """Full attention over a paged cache of keys and values."""

    def qk_norm_rope_append(
        self,
        qkv: Array,
        *,
        q_norm: Array,
        k_norm: Array,
        eps: float,
        rope: Array,
        cache: PagedCache,
        batch: AttentionBatch,
    ) -> Array:
        """Per-head RMSNorm of Q and K, then RoPE in half layout, then K and V into the cache.

        Args:
            qkv: `[T, (H + 2 K) D]`, query heads, then key heads, then value heads.
            q_norm: `[D]`, shared by all query heads.
            k_norm: `[D]`, shared by all key heads.
            eps: of both norms.
            rope: `[2, positions, D / 2]` float32, cosines then sines (`rope_table`).
            cache: of keys and values, mutated: the entries that its cache slots in the batch name.
            batch: positions and cache slots of the tokens.

        Returns:
            `[T, H, D]` queries after norm and rope. Pairs are `(i, i + D/2)`: Su et al. 2021, eq. 34, in the
            half layout of GPT-NeoX.
        """
        ...

    def rope_append(self, qkv: Array, *, rope: Array, cache: PagedCache, batch: AttentionBatch) -> Array:
        """RoPE of Q and K in half layout, then K and V into the cache: `qk_norm_rope_append` without the norms.

        Args:
            qkv: `[T, (H + 2 K) D]`, query heads, then key heads, then value heads.
            rope: `[2, positions, D / 2]` float32, cosines then sines (`rope_table`).
            cache: of keys and values, mutated: the entries that its cache slots in the batch name.
            batch: positions and cache slots of the tokens.

        Returns:
            `[T, H, D]` rotated queries.
        """
        ...

    def zero_centred_qk_norm_rope_append(
        self,
        qkv: Array,
        *,
        q_norm: Array,
        k_norm: Array,
        eps: float,
        rope: Array,
        cache: PagedCache,
        batch: AttentionBatch,
    ) -> Array:
        """As `qk_norm_rope_append`, with the norm of `zero_centred_rms_norm`: Gemma-3's."""
        ...

    def paged_attention(
        self,
        q: Array,
        cache: PagedCache,
        *,
        batch: AttentionBatch,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: Array | None = None,
        first_key: int = 0,
    ) -> Array:
        """Causal attention of each row's tokens over its paged context, softmax in float32.

        Query head `j` reads KV head `j // (H / K)`. A token at position p sees positions 0..p, with a window w those
        above p - w. `s = scale q . k`, with a soft cap c `s = c tanh(s / c)`; `P = exp(s - m) / sum exp(s - m)`, where
        a sink is one more term of the sum, and of the maximum m.

        Args:
            q: `[T, H, D]`.
            cache: of keys and values, this step's tokens already appended.
            batch: rows of any length.
            scale: multiplies the scores, usually `D ** -0.5`.
            window: keys that a token sees, its own among them, at least 1: `sliding_window` of transformers. What a
                cache holds before the window of a row's first token may be anything and never changes a result.
            soft_cap: above 0; bounds the scores before they are masked (Gemma Team 2024, "Gemma 2", section 2).
            sinks: `[H]` float32, a logit per head that has no value, neither scaled nor capped: "attention sinks" of
                OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card", section 2.
            first_key: positions before it are seen by no token, and what a cache holds there may be anything: drafters
                whose first key belongs to the second token. Not together with a window; on a GPU for rows of one token,
                and heads of 64 dimensions or more in a cache in the compute dtype. A token before it gets any result.

        Returns:
            `[T, H * D]`.
        """
        ...

    def gated_qk_norm_rope_append(
        self,
        projected: Array,
        *,
        q_norm: Array,
        k_norm: Array,
        eps: float,
        rope: Array,
        cache: PagedCache,
        batch: AttentionBatch,
    ) -> Array:
        """Zero-centred RMSNorm of Q and K per head, then RoPE of their first dimensions, then K and V into the cache.

        Args:
            projected: `[T, (2 H + 2 K) D]`: per query head `D` query values, then `D` gate values, which are left to
                `output_gate`; after them key heads, then value heads.
            q_norm: `[D]`, shared by all query heads.
            k_norm: `[D]`, shared by all key heads.
            eps: of both norms.
            rope: `[2, positions, r / 2]` float32, cosines then sines; the first `r <= D` dimensions are rotated, in
                pairs `(i, i + r/2)`, and the others left as they are.
            cache: of keys and values, mutated: the entries that its cache slots in the batch name.
            batch: positions and cache slots of the tokens.

        Returns:
            `[T, H, D]` queries after norm and rope. Partial rotation: Black et al. 2022, "GPT-NeoX-20B", section 2.1.
        """
        ...

    def output_gate(self, attended: Array, projected: Array, *, head_dim: int) -> Array:
        """`attended * sigmoid(gate)`: `[T, H D]`.

        Qiu et al. 2025, "Gated Attention for Large Language Models", section 2.2: a gate per element, after attention.

        Args:
            attended: `[T, H D]`, of `paged_attention`.
            projected: `[T, (2 H + 2 K) D]`, as `gated_qk_norm_rope_append` takes it.
            head_dim: `D`.
        """
        ...
