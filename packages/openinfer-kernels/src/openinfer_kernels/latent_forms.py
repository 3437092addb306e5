"""The two forms of latent attention, and which is less work.

expanded   keys and values of every head from each latent of a context, once; then `dn + dr + dv` products per head,
           query and key
absorbed   `r + dr + r` products per head, query and key, over the latents themselves
"""

from dataclasses import dataclass

from openinfer_kernels.errors import ArrayMismatchError


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentShape:
    """Sizes of one call of `Ops.latent_attention`."""

    num_heads: int
    """`H`"""
    nope_dim: int
    """`dn`"""
    rope_dim: int
    """`dr`"""
    value_dim: int
    """`dv`"""
    latent_dim: int
    """`r`"""

    @classmethod
    def of(cls, q: tuple[int, ...], cache: tuple[int, ...], kv_b_proj: tuple[int, ...]) -> "LatentShape":
        """The sizes from the shapes of the arguments; raises `ArrayMismatchError` where they do not agree."""
        if len(q) == 3 and len(cache) == 6 and len(kv_b_proj) == 2 and q[1] > 0:
            latent = kv_b_proj[1]
            rope = cache[5] - latent
            nope = q[2] - rope
            value = kv_b_proj[0] // q[1] - nope
            if min(rope, nope, value) > 0 and kv_b_proj[0] % q[1] == 0 and cache[2:4] == (1, 1):
                return cls(num_heads=q[1], nope_dim=nope, rope_dim=rope, value_dim=value, latent_dim=latent)
        raise ArrayMismatchError(
            f"q {q}, cache {cache} and kv_b_proj {kv_b_proj} are not [T, H, dn + dr], "
            "[blocks, layers, 1, 1, B, r + dr] and [H (dn + dv), r]"
        )

    @property
    def head_dim(self) -> int:
        """`dn + dr`."""
        return self.nope_dim + self.rope_dim

    @property
    def least_expanded_tokens(self) -> float:
        """From so many query tokens of a row on, the expanded form is less work; infinite where it never is."""
        saved = 2 * self.latent_dim - self.nope_dim - self.value_dim
        return self.latent_dim * (self.nope_dim + self.value_dim) / saved if saved > 0 else float("inf")
