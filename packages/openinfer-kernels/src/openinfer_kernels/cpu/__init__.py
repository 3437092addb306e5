"""The operators in NumPy, float32, for every CPU."""

from openinfer_kernels.cpu.batch_invariant import BatchInvariantCpuOps
from openinfer_kernels.cpu.ops import CpuOps

__all__ = ["BatchInvariantCpuOps", "CpuOps"]
