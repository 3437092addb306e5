"""A product with a weight of either kind, for models whose checkpoints come in both."""

from openinfer_kernels.ops import Array, Ops, QuantisedWeight, Weight


def project(ops: Ops, x: Array, weight: Weight) -> Array:
    """`x [T, in] @ weight [out, in].T`: `[T, out]`, by `Ops.linear` or `Ops.quantised_linear`."""
    return ops.quantised_linear(x, weight) if isinstance(weight, QuantisedWeight) else ops.linear(x, weight)
