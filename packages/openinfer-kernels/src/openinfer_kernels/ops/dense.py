"""Products of every model: embedding, linear layers, the gated MLP's first half, logits."""

from typing import Protocol

from openinfer_kernels.ops.arrays import Array
from openinfer_kernels.ops.batch import AttentionBatch
from openinfer_kernels.ops.quantised import LinearWeight


class DenseOps(Protocol):
    """Products of every model: embedding, linear layers, the gated MLP's first half, logits."""

    def embedding(self, token_ids: Array, table: Array) -> Array:
        """Rows of `table [V, h]`, of the compute dtype or float32, for `token_ids [T]`: `[T, h]` of the same dtype."""
        ...

    def residual_embedding(self, token_ids: Array, table: Array, *, scale: float = 1.0) -> Array:
        """Rows of `table [V, h]` of the compute dtype for `token_ids [T]`, times `scale`: `[T, h]`, a residual stream.

        Rows become float32 before they are multiplied, and are not rounded after it.
        """
        ...

    def linear(self, x: Array, weight: LinearWeight, batch: AttentionBatch, bias: Array | None = None) -> Array:
        """`x [T, in] @ weight [out, in].T (+ bias [out])`: `[T, out]`; a quantised weight has no bias.

        `batch` is that of the tokens in `x`: where a token's request asks for an adapter, `openinfer_kernels.adapted`
        adds what it changes. All products of a layer are given it. Operators that quantise activations
        (`weights/low_bit_activations.py`) do so in the steps that it says.
        """
        ...

    def logits(self, hidden: Array, head: LinearWeight) -> Array:
        """`hidden [T, h] @ head [V, h].T`: `[T, V]`, float32 whatever the compute dtype, the sums unrounded.

        Rounding them to BF16 would move a logit of 30 by up to 0.06, and make equals of the likeliest tokens. A
        quantised head is one of `quantise_head`.
        """
        ...

    def linear_swiglu(self, x: Array, gate_up: LinearWeight, batch: AttentionBatch) -> Array:
        """`silu(x @ gate.T) * (x @ up.T)`: `[T, F]`, with `gate_up [2 F, h]` = gate rows, then up rows.

        Both products are rounded to the compute dtype first, as `linear` rounds them, and the result once. `batch` is
        what `linear` takes.

        SwiGLU: Shazeer 2020, "GLU Variants Improve Transformer", eq. 6 without the outer projection.
        """
        ...

    def linear_geglu(self, x: Array, gate_up: LinearWeight, batch: AttentionBatch) -> Array:
        """`gelu(x @ gate.T) * (x @ up.T)`: `[T, F]`, with arguments and roundings of `linear_swiglu`.

        GEGLU: Shazeer 2020, eq. 6 without the outer projection, with the GELU of `geglu`.
        """
        ...

    def geglu(self, gate_up: Array) -> Array:
        """`gelu(gate) * up` for `gate_up [T, 2 F]`, gate values, then up values: `[T, F]`, rounded once.

        `gelu(g) = g / 2 (1 + tanh(sqrt(2 / pi) (g + 0.044715 g^3)))`: Hendrycks and Gimpel 2016, "Gaussian Error Linear
        Units", section 2; `gelu_pytorch_tanh` of transformers.
        """
        ...

    def soft_cap(self, logits: Array, *, cap: float) -> None:
        """`cap * tanh(logits / cap)` of `logits [T, V]` float32, in place; `cap` is above 0.

        Gemma Team 2024, "Gemma 2: Improving Open Language Models at a Practical Size", section 2.
        """
        ...
