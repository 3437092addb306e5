"""What stands in the place of an operator that a device has no kernel for."""

from collections.abc import Callable
from typing import Any

from openinfer_kernels.errors import OperatorMissingError


def missing_on_gpu(operator: str) -> Callable[..., Any]:
    """A method that raises `OperatorMissingError` for the operator of this name, whatever it is called with."""

    def refuse(*given: object, **named: object) -> Any:
        del given, named
        raise OperatorMissingError(f"{operator} has no CUDA kernel yet; models that need it run with --device cpu")

    return refuse
