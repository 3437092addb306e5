"""Low-rank adapters: what a token's adapter adds to a product of the model's weights."""

from collections.abc import Sequence
from typing import Protocol

from openinfer_kernels.ops.arrays import Array


class FusedAdapters(Protocol):
    """Products with adapters in one launch, where a device has them.

    The B's of all slots lie next to each other then, `[out, E]` with `E` at least `slots * r`, and zeros after them.
    """

    def columns(self, weight: Array, *, num_slots: int, rank: int, starts: Sequence[int]) -> int:
        """`E`; 0 where it does not multiply with this weight in which adapters have so many slots."""
        ...

    def linear(
        self, x: Array, weight: Array, a: Array, columns: Array, adapter_slots: Array, *, starts: Sequence[int]
    ) -> Array:
        """`linear` without a bias and what adapters add, rounded once."""
        ...

    def linear_swiglu(
        self, x: Array, gate_up: Array, a: Array, columns: Array, adapter_slots: Array, *, starts: Sequence[int]
    ) -> Array:
        """`linear_swiglu`, with what adapters add to gate and up."""
        ...


class LoraOps(Protocol):
    """`y += B (A x)` with the adapter of each token, several adapters and none in one batch.

    Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", section 4.1; the two halves and their names
    are those of Chen et al. 2023, "Punica", as vLLM has them. A product of several matrices below each other ("pieces",
    such as those of Q, K and V) has an A and a B for each: `P` pieces, of rank `r` at most. What is missing to `r` is
    zero. The scale (alpha / rank) is part of B.
    """

    @property
    def fused_adapters(self) -> FusedAdapters | None:
        """None where adapters are added after each product."""
        ...

    def lora_shrink(self, x: Array, a: Array, adapter_slots: Array) -> Array:
        """`x [T, in]` times the A of each token's adapter: `[S, T, P, r]`, float32 whatever the compute dtype.

        It is the sum over the first axis: `S` parts of the inner size, one up to 1,024 columns, else as many as suit
        the device.

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
            shrunk: `[S, T, P, r]` float32, of `lora_shrink`.
            b: `[slots, out, r]`; rows may lie apart.
            adapter_slots: `[T]` int32, as in `lora_shrink`.
            starts: `P + 1` ascending rows: piece `p` is `starts[p] : starts[p + 1]` of `out`; rows of no piece keep
                theirs.
        """
        ...

    def lora_expand_swiglu(
        self, gate_up: Array, shrunk: Array, b: Array, adapter_slots: Array, *, starts: Sequence[int]
    ) -> Array:
        """`lora_expand` and then `swiglu`, in one pass: `[T, F]` for `gate_up [T, 2 F]`, gate values, then up values.

        Args:
            gate_up: the product without adapters.
            shrunk: `[S, T, 2, r]` float32, of `lora_shrink`.
            b: `[slots, 2 F, r]`.
            adapter_slots: `[T]` int32, as in `lora_shrink`; tokens without an adapter have their `swiglu` too.
            starts: 0, F and 2 F.
        """
        ...
