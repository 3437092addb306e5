"""Norms over the last axis, alone or after adding into a residual stream.

A residual stream is float32 whatever the compute dtype: what a layer adds is small next to what the stream holds, and
rounding the sum after each would be most of the error of a model in BF16. Norms read it unrounded, compute in float32,
and round once, to the compute dtype.
"""

from typing import Protocol

from openinfer_kernels.ops.arrays import Array


class NormOps(Protocol):
    """Norms over the last axis, alone or after adding into a residual stream."""

    def rms_norm(self, x: Array, weight: Array, *, eps: float) -> Array:
        """`weight * x / sqrt(mean(x^2) + eps)` of the rows of `x [T, n]`, of the compute dtype or float32.

        Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", eq. 4. Hugging Face's models round before the
        weight too.
        """
        ...

    def add_rms_norm(self, x: Array, residual: Array, weight: Array, *, eps: float) -> Array:
        """Adds `x [T, h]` into the float32 `residual [T, h]` in place and returns `rms_norm(residual)`.

        Args:
            x: what a layer adds, of the compute dtype, or float32 where it is a sum over experts.
            residual: mutated.
            weight: `[h]` of the compute dtype.
            eps: added to the mean.
        """
        ...

    def zero_centred_rms_norm(self, x: Array, weight: Array, *, eps: float) -> Array:
        """`(1 + weight) * x / sqrt(mean(x^2) + eps)` of the rows of `x [T, n]`, of the compute dtype or float32.

        Gemma's convention: a weight of zeros changes nothing. Reference: `Qwen3_5RMSNorm` of transformers.
        """
        ...

    def add_zero_centred_rms_norm(self, x: Array, residual: Array, weight: Array, *, eps: float) -> Array:
        """As `add_rms_norm`, with the norm of `zero_centred_rms_norm`."""
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
