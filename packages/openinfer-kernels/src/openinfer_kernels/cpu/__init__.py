"""The operators in NumPy, float32, for every CPU.

They are imported when they are first asked for: the GPU's operators take from this package how a host reads weights.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openinfer_kernels.cpu.batch_invariant import BatchInvariantCpuOps
    from openinfer_kernels.cpu.low_bit import LowBitCpuOps
    from openinfer_kernels.cpu.ops import CpuOps

__all__ = ["BatchInvariantCpuOps", "CpuOps", "LowBitCpuOps"]

_MODULES = {"BatchInvariantCpuOps": "batch_invariant", "CpuOps": "ops", "LowBitCpuOps": "low_bit"}


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{module}"), name)
