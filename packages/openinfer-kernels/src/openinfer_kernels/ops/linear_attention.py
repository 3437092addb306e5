"""Attention by a recurrent state: short convolutions and delta rules."""

from typing import Protocol

from openinfer_kernels.ops.arrays import Array
from openinfer_kernels.ops.batch import AttentionBatch, KeptInputs


class LinearAttentionOps(Protocol):
    """Attention by a recurrent state: short convolutions and delta rules."""

    def causal_conv_silu(self, x: Array, weight: Array, *, state: Array, layer: int, batch: AttentionBatch) -> Array:
        """Depthwise convolution over the tokens of each row, then `silu`: `[T, C]`.

        `y_t[c] = silu(sum_j weight[c, j] * x_{t - W + 1 + j}[c])`; what lies before a sequence's first token is zero.

        Args:
            x: `[T, C]`; rows may lie further apart than they are long, as columns of a wider product.
            weight: `[C, W]`, the last tap for the token itself.
            state: `[slots, layers, C, W - 1]`, the last inputs of each sequence, oldest first; mutated: those of
                `batch.state_slots` in this layer.
            layer: index into the layer axis.
            batch: rows of any length; of `batch.kept_rows` the state is not changed.
        """
        ...

    def gated_delta_rule(
        self,
        qkv: Array,
        gates: Array,
        *,
        a_log: Array,
        dt_bias: Array,
        state: Array,
        layer: int,
        batch: AttentionBatch,
    ) -> Array:
        """Linear attention with decay and delta rule, in float32 throughout: `[T, N dv]`.

        Per value head: `S <- e^g S`, `S <- S + k (beta (v - S^T k))^T`, `o = S^T q`, with `beta = sigmoid(b)` and
        `g = -exp(a_log) softplus(a + dt_bias)`. `q` and `k` are divided by `sqrt(sum of squares + 1e-6)`, then `q` by
        `sqrt(dk)`. Value head `j` reads key head `j // (N / Hk)`. Yang et al. 2024, "Gated Delta Networks", eq. 10.

        Args:
            qkv: `[T, 2 Hk dk + N dv]`, query heads, then key heads, then value heads.
            gates: `[T, 2 N]`, `b` of each value head, then `a`; rows as those of `causal_conv_silu`.
            a_log: `[N]` float32.
            dt_bias: `[N]`, of the compute dtype or float32.
            state: `[slots, layers, N, dk, dv]` float32, `S` of each sequence; mutated: those of `batch.state_slots` in
                this layer.
            layer: index into the layer axis.
            batch: as above.
        """
        ...


class ReplayOps(Protocol):
    """States that take in tokens of a row once it is known which of them count. Our own operators alone keep inputs."""

    def keep_inputs(self, *, conv: Array, state: Array, most_tokens: int) -> KeptInputs | None:
        """Memory for `AttentionBatch.kept`; None where states of this shape are not replayed.

        Args:
            conv: of `causal_conv_silu`.
            state: of `gated_delta_rule`.
            most_tokens: of a row.
        """
        ...

    def replay_inputs(self, kept: KeptInputs, *, conv: Array, state: Array, slots: Array, counts: Array) -> None:
        """Has states take in the first tokens of rows whose inputs were kept, bit for bit as steps of one token do.

        Args:
            kept: of the step before.
            conv: mutated in `slots`, all layers.
            state: likewise.
            slots: `[n]` int32, each at most once.
            counts: `[n]` int32 tokens of each, `0 .. M`.
        """
        ...
