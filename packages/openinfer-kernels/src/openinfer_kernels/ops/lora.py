"""Low-rank adapters: what a token's adapter adds to a product of the model's weights."""

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol

from openinfer_kernels.ops.arrays import Array
from openinfer_kernels.ops.batch import AttentionBatch
from openinfer_kernels.ops.cache import PagedCache


class DeltaOperator(StrEnum):
    """An operator that may add what adapters do to its input, by its name in `Ops`."""

    ADD_RMS_NORM = "add_rms_norm"
    QK_NORM_ROPE_APPEND = "qk_norm_rope_append"


class AddedBy(NamedTuple):
    """The operator to which a model hands a product as it is, before any other operator runs, and to nothing else."""

    operator: DeltaOperator
    head_dim: int = 0
    """Of `QK_NORM_ROPE_APPEND`: the pieces of the product are Q, K and V, in whole heads."""


class DeferredProduct(Protocol):
    """A product without what adapters add, and what the operator after it needs to add that."""

    @property
    def y(self) -> Array:
        """`[T, out]`, with the bits of a product without adapters."""
        ...

    @property
    def added_by(self) -> AddedBy: ...


class DeferredAdapters(Protocol):
    """Products whose adapters the operator after them adds, where a device has them.

    That operator adds in float32 to a product that was rounded; a token without an adapter has the bits that it has
    without adapters.
    """

    def linear(
        self,
        x: Array,
        weight: Array,
        a: Array,
        columns: Array,
        adapter_slots: Array,
        *,
        starts: Sequence[int],
        added_by: AddedBy,
    ) -> DeferredProduct | None:
        """As `FusedAdapters.linear`; None where it is not served, which depends on shapes alone."""
        ...

    def linear_swiglu(
        self, x: Array, gate_up: Array, a: Array, columns: Array, adapter_slots: Array, *, starts: Sequence[int]
    ) -> Array | None:
        """As `FusedAdapters.linear_swiglu`; None where it is not served, which depends on shapes alone.

        Gate and up are rounded before and after adapters are added, as by `lora_expand_swiglu`.
        """
        ...

    def add_rms_norm(self, product: DeferredProduct, residual: Array, weight: Array, *, eps: float) -> Array:
        """`Ops.add_rms_norm` of the product and what adapters add to it."""
        ...

    def qk_norm_rope_append(
        self,
        product: DeferredProduct,
        *,
        q_norm: Array,
        k_norm: Array,
        eps: float,
        rope: Array,
        cache: PagedCache,
        batch: AttentionBatch,
    ) -> Array:
        """`Ops.qk_norm_rope_append` of the product and what adapters add to it."""
        ...


class FusedAdapters(Protocol):
    """Products with adapters in one launch, where a device has them.

    The B's of all slots lie next to each other then, `[out, E]` with `E` at least `slots * r`, and zeros after them.
    """

    @property
    def deferred(self) -> DeferredAdapters:
        """What serves some products in another way: they are asked first."""
        ...

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
