"""Hyper-connections: several residual streams per token; each sublayer reads and writes them through its own mix."""

from dataclasses import dataclass
from typing import Protocol

from openinfer_kernels.ops.arrays import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class HyperMix:
    """How one sublayer's output goes back into the streams of each token."""

    post: Array
    """`[T, n]` float32: how much of the output each stream takes."""
    mixing: Array
    """`[T, n, n]` float32: `[j, k]` is how much of stream `j` goes to stream `k`; rows and columns sum to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HyperWeights:
    """What the mix of one sublayer is computed with, all float32."""

    fn: Array
    """`[2 n + n^2, n h]`: rows for reading, for writing, then for the mixing matrix, row by row."""
    base: Array
    """`[2 n + n^2]`"""
    scale: Array
    """`[3]`, of reading, writing and mixing."""


class HyperConnectionOps(Protocol):
    """Hyper-connections: Xie et al. 2026, "mHC: Manifold-Constrained Hyper-Connections", eq. 8.

    `n` streams; everything is computed in float32.
    """

    def hyper_streams(self, x: Array, num_streams: int) -> Array:
        """`x [T, h]` in every stream: `[T, n, h]`."""
        ...

    def hyper_read(
        self, residual: Array, weights: HyperWeights, *, eps: float, mix_eps: float, num_iterations: int
    ) -> tuple[Array, HyperMix]:
        """What a sublayer computes on, `[T, h]`, and how its output goes back.

        `m = fn @ flat(residual) / sqrt(mean(flat(residual)^2) + eps)`. Stream `i` is read with the weight
        `sigmoid(scale[0] m + base) + mix_eps` and written with `2 sigmoid(scale[1] m + base)`. The mixing matrix is
        `softmax` over each row of `scale[2] m + base`, plus `mix_eps`, made doubly stochastic as by Sinkhorn and Knopp
        1967: its columns are divided by their sums plus `mix_eps`; then, `num_iterations - 1` times, rows and columns.

        Args:
            residual: `[T, n, h]`.
            weights: of this sublayer.
            eps: of the norm.
            mix_eps: see above.
            num_iterations: at least 1.
        """
        ...

    def hyper_write(self, y: Array, residual: Array, mix: HyperMix) -> None:
        """`residual[k] <- post[k] y + sum_j mixing[j, k] residual[j]`, in place.

        Args:
            y: `[T, h]`, a sublayer's output, of the compute dtype or float32.
            residual: `[T, n, h]`, mutated.
            mix: of the `hyper_read` before the sublayer.
        """
        ...

    def hyper_add(self, x: Array, residual: Array) -> None:
        """Adds `x [T, h]` to every stream of `residual [T, n, h]`, in place."""
        ...

    def hyper_head(self, residual: Array, fn: Array, base: Array, scale: Array, *, eps: float, mix_eps: float) -> Array:
        """One vector of all streams, `[T, h]`, each read as `hyper_read` reads it.

        Args:
            residual: `[T, n, h]`.
            fn: `[n, n h]` float32.
            base: `[n]` float32.
            scale: `[1]` float32.
            eps: of the norm.
            mix_eps: added to the weights.
        """
        ...
