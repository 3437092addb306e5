"""The operators in NumPy, float32, for every CPU."""

from openinfer_kernels.cpu.ops import CpuOps

__all__ = ["CpuOps"]
