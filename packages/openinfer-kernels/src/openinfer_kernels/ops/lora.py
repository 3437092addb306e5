"""Low-rank adapters: what a token's adapter adds to a product of the model's weights."""

from collections.abc import Sequence
from typing import Protocol

from openinfer_kernels.ops.arrays import Array


class LoraOps(Protocol):
    """`y += B (A x)` with the adapter of each token, several adapters and none in one batch.

    Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", section 4.1; the two halves and their names
    are those of Chen et al. 2023, "Punica", as vLLM has them. A product of several matrices below each other ("pieces",
    such as those of Q, K and V) has an A and a B for each: `P` pieces, of rank `r` at most. What is missing to `r` is
    zero. The scale (alpha / rank) is part of B.
    """

    def lora_shrink(self, x: Array, a: Array, adapter_slots: Array) -> Array:
        """`x [T, in]` times the A of each token's adapter: `[T, P, r]`, float32 whatever the compute dtype.

        Args:
            x: of the compute dtype.
            a: `[slots, P, r, in]`.
            adapter_slots: `[T]` int32, the slot of each token's adapter; below 0: none, and its result is zero.
        """
        ...

    def lora_expand(self, y: Array, shrunk: Array, b: Array, adapter_slots: Array, *, starts: Sequence[int]) -> None:
        """Adds `shrunk` times the B of each token's adapter to `y`, in place; tokens without one keep theirs.

        The sum over the rank is float32, and so is the addition; the result is rounded once.

        Args:
            y: `[T, out]` of the compute dtype.
            shrunk: `[T, P, r]` float32, of `lora_shrink`.
            b: `[slots, out, r]`.
            adapter_slots: `[T]` int32, as in `lora_shrink`.
            starts: `P + 1` ascending rows: piece `p` is `starts[p] : starts[p + 1]` of `out`; rows of no piece keep
                theirs.
        """
        ...
