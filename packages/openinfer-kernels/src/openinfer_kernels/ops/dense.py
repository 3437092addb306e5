"""Products of every model: embedding, linear layers, the gated MLP's first half."""

from typing import Protocol

from openinfer_kernels.ops.arrays import Array
from openinfer_kernels.ops.quantised import LinearWeight


class DenseOps(Protocol):
    """Products of every model: embedding, linear layers, the gated MLP's first half."""

    def embedding(self, token_ids: Array, table: Array) -> Array:
        """Rows of `table [V, h]`, of the compute dtype or float32, for `token_ids [T]`: `[T, h]` of the same dtype."""
        ...

    def residual_embedding(self, token_ids: Array, table: Array) -> Array:
        """Rows of `table [V, h]` of the compute dtype for `token_ids [T]`: `[T, h]` float32, a residual stream."""
        ...

    def linear(self, x: Array, weight: LinearWeight, bias: Array | None = None) -> Array:
        """`x [T, in] @ weight [out, in].T (+ bias [out])`: `[T, out]`; a quantised weight has no bias."""
        ...

    def logits(self, hidden: Array, head: Array) -> Array:
        """`hidden [T, h] @ head [V, h].T`: `[T, V]`, float32 whatever the compute dtype, the sums unrounded.

        Rounding them to BF16 would move a logit of 30 by up to 0.06, and make equals of the likeliest tokens.
        """
        ...

    def linear_swiglu(self, x: Array, gate_up: LinearWeight) -> Array:
        """`silu(x @ gate.T) * (x @ up.T)`: `[T, F]`, with `gate_up [2 F, h]` = gate rows, then up rows.

        Both products are rounded to the compute dtype first, as `linear` rounds them, and the result once.

        SwiGLU: Shazeer 2020, "GLU Variants Improve Transformer", eq. 6 without the outer projection.
        """
        ...
