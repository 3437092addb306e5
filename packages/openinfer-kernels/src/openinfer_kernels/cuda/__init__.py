"""The operators on NVIDIA GPUs: CuPy arrays in BF16, sums in float32. Needs the extra `cuda13` or `cuda12`."""

from openinfer_kernels.cuda.batch_invariant import BatchInvariantCudaOps
from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.cuda.ops import CudaOps

__all__ = ["BatchInvariantCudaOps", "CudaOps", "Device"]
