"""The provider: two operators of the contract `openinfer_kernels.Ops`."""

from collections.abc import Mapping

import numpy as np

from openinfer_kernels import Array, Ops
from openinfer_kernels.providers import Operator


class ExactNorm:
    """`rms_norm` and `add_rms_norm` on a CPU."""

    operators = ("add_rms_norm", "rms_norm")
    architectures = ("cpu",)

    def bind(self, own: Ops) -> Mapping[str, Operator]:
        """Needs nothing of the device."""
        del own
        return {"rms_norm": rms_norm, "add_rms_norm": add_rms_norm}


def rms_norm(x: Array, weight: Array, *, eps: float) -> Array:
    """`weight * x / sqrt(mean(x^2) + eps)` over the last axis, as `Ops.rms_norm` says."""
    wide = x.astype(np.float64)
    scale = 1 / np.sqrt(np.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (weight * wide * scale).astype(weight.dtype)


def add_rms_norm(x: Array, residual: Array, weight: Array, *, eps: float) -> Array:
    """Adds `x` into `residual` in place and norms the sum, as `Ops.add_rms_norm` says."""
    residual += x
    return rms_norm(residual, weight, eps=eps)
