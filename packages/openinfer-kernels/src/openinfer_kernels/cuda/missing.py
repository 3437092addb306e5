"""Operators of the contract that no CUDA kernel serves yet: each refuses by name.

`openinfer_kernels.catalogue.WITHOUT_GPU_KERNEL` lists them.
"""

from typing import NoReturn

from openinfer_kernels.errors import OperatorMissingError
from openinfer_kernels.ops import Array, LinearWeight


class Missing:
    """What stands in their place."""

    def linear_geglu(self, x: Array, gate_up: LinearWeight) -> Array:
        _refuse("linear_geglu")

    def geglu(self, gate_up: Array) -> Array:
        _refuse("geglu")

    def soft_cap(self, logits: Array, *, cap: float) -> None:
        _refuse("soft_cap")


def _refuse(operator: str) -> NoReturn:
    raise OperatorMissingError(f"{operator} has no CUDA kernel yet; serve the model with --device cpu")
