"""The operators on NVIDIA GPUs: CuPy arrays in BF16, sums in float32. Needs the extra `cuda13` or `cuda12`.

They are imported when they are first asked for, which is when CuPy is: what plans kernels on the host needs neither.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openinfer_kernels.cuda.batch_invariant import BatchInvariantCudaOps
    from openinfer_kernels.cuda.common.device import Device
    from openinfer_kernels.cuda.ops import CudaOps

__all__ = ["BatchInvariantCudaOps", "CudaOps", "Device"]

_MODULES = {"BatchInvariantCudaOps": "batch_invariant", "CudaOps": "ops", "Device": "common.device"}


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{module}"), name)
