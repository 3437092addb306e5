"""Conformance kits for implementers of operators. No test framework is needed.

providers        `check_kernel_provider`, for a `KernelProvider`
paged            cases of attention over a paged cache
physical_memory  `FakePhysicalMemory`: a driver's virtual memory

A violation raises `ConformanceError`, an `AssertionError` that says what the contract demands.
"""

from openinfer_kernels.testing.errors import ConformanceError

__all__ = ["ConformanceError"]
