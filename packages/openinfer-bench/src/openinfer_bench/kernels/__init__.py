"""`openinfer bench kernels`: the time of each CUDA operator at a model's shapes, and its share of the roofline."""

from openinfer_bench.kernels.command import run

OPENINFER_CONTRACT = 1

__all__ = ["run"]
