"""`AdaptedOps`: operators whose products have low-rank adapters added, whatever makes the products.

    linear(x, weight, batch) ─► own.linear ─► y ─► y += B (A x), where a token of the batch asks for an adapter

A model hands its weights to `linear` and `linear_swiglu` as always. Which of them adapters change is known here by the
weight itself, so no family has code for it, a weight may be quantised, and a `KernelProvider` may serve the product.

Where a device has it, and a model has said when it loaded a weight which operator its product is handed to, that one
adds what adapters do (`Ops.fused_adapters.deferred`):

    linear(x, weight, batch) ─► y, without adapters ─► add_rms_norm(y), of this very array ─► that of y + B (A x)

In between no other operator may be asked for: a model that does so is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from openinfer_kernels.errors import DeferredAdaptersError
from openinfer_kernels.ops.arrays import Array
from openinfer_kernels.ops.batch import AttentionBatch
from openinfer_kernels.ops.cache import PagedCache
from openinfer_kernels.ops.lora import AddedBy, DeltaOperator
from openinfer_kernels.ops.quantised import LinearWeight, QuantisedWeight

if TYPE_CHECKING:
    from openinfer_kernels.ops import Ops
    from openinfer_kernels.ops.lora import DeferredAdapters, DeferredProduct, FusedAdapters


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterWeights:
    """What the adapter slots hold for one product; the arguments of `Ops.lora_shrink` and `Ops.lora_expand`."""

    a: Array
    """`[slots, P, r, in]`"""
    b: Array
    """`[slots, out, r]`"""
    starts: tuple[int, ...]
    """`P + 1` rows of `out`: where each piece begins, and the last one ends."""
    columns: Array | None = None
    """`[out, E]`, of which `b` is a view, for `Ops.fused_adapters`; None where it does not serve the product."""
    added_by: AddedBy | None = None
    """The operator that may add what adapters do; None where the product has to."""


class AdaptedWeights:
    """The weights that adapters change, each with what the adapter slots hold for it."""

    def __init__(self) -> None:
        # By identity: an array cannot be hashed. The weight is kept with its entry, so that no other has its id.
        self._by_id: dict[int, tuple[LinearWeight, AdapterWeights]] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, weight: LinearWeight, adapters: AdapterWeights) -> None:
        self._by_id[id(weight)] = weight, adapters

    def find(self, weight: LinearWeight) -> AdapterWeights | None:
        found = self._by_id.get(id(weight))
        return None if found is None else found[1]


def with_adapters(own: "Ops", weights: AdaptedWeights) -> "Ops":
    """`own`, and the adapters of a batch's tokens in every product with one of these weights."""
    return cast("Ops", _AdaptedOps(own, weights))


class _AdaptedOps:
    def __init__(self, own: "Ops", weights: AdaptedWeights) -> None:
        self._own = own
        self._weights = weights
        self._deferred: tuple[DeferredAdapters, DeferredProduct] | None = None  # until the operator after the product

    def __getattr__(self, name: str) -> Any:
        self._refuse_deferred(name)
        return getattr(self._own, name)

    @property
    def extra(self) -> Mapping[str, Any]:
        return self._own.extra

    def linear(self, x: Array, weight: LinearWeight, batch: AttentionBatch, bias: Array | None = None) -> Array:
        self._refuse_deferred("linear")
        slots, adapters = batch.adapter_slots, self._weights.find(weight)
        if slots is None or adapters is None:
            return self._own.linear(x, weight, batch, bias)
        if bias is None and (found := self._fused(weight, adapters)) is not None:
            fused, plain, columns = found
            if (added_by := adapters.added_by) is not None:
                deferred, starts = fused.deferred, adapters.starts
                product = deferred.linear(x, plain, adapters.a, columns, slots, starts=starts, added_by=added_by)
                if product is not None:
                    self._deferred = deferred, product
                    return product.y
            return fused.linear(x, plain, adapters.a, columns, slots, starts=adapters.starts)
        # Before the product, which on a GPU fetches its weights while this runs.
        shrunk = self._own.lora_shrink(x, adapters.a, slots)
        y = self._own.linear(x, weight, batch, bias)
        self._own.lora_expand(y, shrunk, adapters.b, slots, starts=adapters.starts)
        return y

    def linear_swiglu(self, x: Array, gate_up: LinearWeight, batch: AttentionBatch) -> Array:
        # Both halves change before the gate: the product is made apart from it, in batches with adapters alone.
        self._refuse_deferred("linear_swiglu")
        slots, adapters = batch.adapter_slots, self._weights.find(gate_up)
        if slots is None or adapters is None:
            return self._own.linear_swiglu(x, gate_up, batch)
        if (found := self._fused(gate_up, adapters)) is not None:
            fused, plain, columns = found
            given = x, plain, adapters.a, columns, slots
            gated = fused.deferred.linear_swiglu(*given, starts=adapters.starts)
            return fused.linear_swiglu(*given, starts=adapters.starts) if gated is None else gated
        shrunk = self._own.lora_shrink(x, adapters.a, slots)
        y = self._own.linear(x, gate_up, batch)
        return self._own.lora_expand_swiglu(y, shrunk, adapters.b, slots, starts=adapters.starts)

    def add_rms_norm(self, x: Array, residual: Array, weight: Array, *, eps: float) -> Array:
        taken = self._take_deferred(DeltaOperator.ADD_RMS_NORM, x)
        if taken is None:
            return self._own.add_rms_norm(x, residual, weight, eps=eps)
        deferred, product = taken
        return deferred.add_rms_norm(product, residual, weight, eps=eps)

    def qk_norm_rope_append(
        self,
        qkv: Array,
        *,
        q_norm: Array,
        k_norm: Array,
        eps: float,
        rope: Array,
        cache: PagedCache,
        batch: AttentionBatch,
    ) -> Array:
        taken = self._take_deferred(DeltaOperator.QK_NORM_ROPE_APPEND, qkv)
        norms = {"q_norm": q_norm, "k_norm": k_norm}
        if taken is None:
            return self._own.qk_norm_rope_append(qkv, **norms, eps=eps, rope=rope, cache=cache, batch=batch)
        deferred, product = taken
        return deferred.qk_norm_rope_append(product, **norms, eps=eps, rope=rope, cache=cache, batch=batch)

    def _take_deferred(self, operator: DeltaOperator, y: Array) -> "tuple[DeferredAdapters, DeferredProduct] | None":
        """What `linear` has left for this operator."""
        deferred = self._deferred
        if deferred is None:
            return None
        product = deferred[1]
        if product.y is not y or product.added_by.operator is not operator:
            self._refuse_deferred(operator)
        self._deferred = None
        return deferred

    def _refuse_deferred(self, name: str) -> None:
        """An operator that would read a product to which adapters have not been added, or that runs before they are."""
        deferred, self._deferred = self._deferred, None
        if deferred is not None:
            wanted = deferred[1].added_by.operator
            raise DeferredAdaptersError(f"{name} runs between an adapted product and the {wanted} that it was made for")

    def _fused(self, weight: LinearWeight, adapters: AdapterWeights) -> "tuple[FusedAdapters, Array, Array] | None":
        """What multiplies with adapters in one launch, the weight as it takes it, and the adapters' columns."""
        fused = self._own.fused_adapters
        if fused is None or adapters.columns is None or isinstance(weight, QuantisedWeight):
            return None
        return fused, weight, adapters.columns

    def linear_geglu(self, x: Array, gate_up: LinearWeight, batch: AttentionBatch) -> Array:
        self._refuse_deferred("linear_geglu")
        if batch.adapter_slots is None or self._weights.find(gate_up) is None:
            return self._own.linear_geglu(x, gate_up, batch)
        return self._own.geglu(self.linear(x, gate_up, batch))
