"""Attention over a paged cache of latents: one compressed vector per token, from which every head's key and value come.

DeepSeek-AI 2024, "DeepSeek-V2", section 2.1, multi-head latent attention. Letters next to those of the package: `r`
dimensions of the latent, `dr` rotated dimensions, `dn` and `dv` dimensions of a head's unrotated key and of its value.
"""

from typing import Protocol

from openinfer_kernels.ops.arrays import Array
from openinfer_kernels.ops.batch import AttentionBatch
from openinfer_kernels.ops.cache import PagedCache


class LatentAttentionOps(Protocol):
    """Attention over a paged cache of latents."""

    def latent_norm_rope_append(
        self,
        q: Array,
        latent: Array,
        *,
        head_dim: int,
        norm: Array,
        eps: float,
        rope: Array,
        cache: PagedCache,
        batch: AttentionBatch,
    ) -> Array:
        """RMSNorm of the latent, RoPE of its key and of the queries, then latent and key into the cache.

        Args:
            q: `[T, H (dn + dr)]`, of each head the unrotated dimensions, then those to be rotated. It and `latent` may
                be columns of a wider array.
            latent: `[T, r + dr]`, the latent, then the key that all heads share.
            head_dim: `dn + dr`.
            norm: `[r]`.
            eps: of the norm.
            rope: `[2, positions, dr / 2]` float32, cosines then sines (`rope_table`).
            cache: of latents, mutated: the entries that its cache slots in the batch name.
            batch: positions and cache slots of the tokens.

        Returns:
            `[T, H, dn + dr]` queries after RoPE. Pairs are `(2 i, 2 i + 1)`, as Su et al. 2021, "RoFormer", eq. 34 has
            them, in queries and keys alike.
        """
        ...

    def latent_attention(
        self,
        q: Array,
        cache: PagedCache,
        *,
        kv_b_proj: Array,
        batch: AttentionBatch,
        scale: float,
        first_key: int = 0,
    ) -> Array:
        """Causal attention of each row's tokens over its paged latents, softmax in float32.

        With `[Wk_j; Wv_j]` the rows of head `j`, its key at a position is `Wk_j latent` next to the shared rotated key,
        and its value `Wv_j latent`. A token at position p sees positions 0..p. An implementation computes keys and
        values (the expanded form), or multiplies the query by `Wk_j` and the mixed latents by `Wv_j` (the absorbed
        form, DeepSeek-V2, section 2.1.2), whichever is less work for a row: in exact arithmetic they are equal.

        Args:
            q: `[T, H, dn + dr]`, as `latent_norm_rope_append` returns it.
            cache: of latents, this step's tokens already appended.
            kv_b_proj: `[H (dn + dv), r]`, of each head the rows of its key, then those of its value.
            batch: rows of any length.
            scale: multiplies the scores.
            first_key: positions before it are seen by no token, and what a cache holds there may be anything: drafters
                of pairs of tokens have none at position 0. Tokens before it get any result.

        Returns:
            `[T, H dv]`.
        """
        ...
