"""`openinfer bench kernels`: the time of each CUDA operator at a model's shapes, and its share of the roofline."""

from openinfer_kernels.bench.command import run

__all__ = ["run"]
