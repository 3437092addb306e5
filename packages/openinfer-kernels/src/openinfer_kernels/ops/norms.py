"""Norms over the last axis."""

from typing import Protocol

from openinfer_kernels.ops.arrays import Array


class NormOps(Protocol):
    """Norms over the last axis."""

    def rms_norm(self, x: Array, weight: Array, *, eps: float) -> Array:
        """`weight * x / sqrt(mean(x^2) + eps)` over the last axis, statistics in float32.

        The normalised vector is rounded to the input dtype before the multiplication, as the reference does.
        Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", eq. 4.
        """
        ...

    def add_rms_norm(self, x: Array, residual: Array, weight: Array, *, eps: float) -> Array:
        """Adds `x [T, h]` into `residual [T, h]` in place and returns `rms_norm(residual)`."""
        ...

    def zero_centred_rms_norm(self, x: Array, weight: Array, *, eps: float) -> Array:
        """`(1 + weight) * x / sqrt(mean(x^2) + eps)` over the last axis, all in float32, rounded once at the end.

        Gemma's convention: a weight of zeros changes nothing. Reference: `Qwen3_5RMSNorm` of transformers.
        """
        ...

    def add_zero_centred_rms_norm(self, x: Array, residual: Array, weight: Array, *, eps: float) -> Array:
        """Adds `x [T, h]` into `residual [T, h]` in place and returns `zero_centred_rms_norm(residual)`."""
        ...

    def gated_rms_norm(self, x: Array, gate: Array, weight: Array, *, eps: float) -> Array:
        """`rms_norm` of each head, times `silu(gate)`, which is computed in float32: `[T, heads n]`.

        Args:
            x: `[T, heads n]`; statistics are over each head's `n` values.
            gate: `[T, heads n]`; rows may lie further apart than they are long, as columns of a wider product.
            weight: `[n]` of the compute dtype or float32, shared by all heads; not zero-centred.
            eps: added to the mean.
        """
        ...
