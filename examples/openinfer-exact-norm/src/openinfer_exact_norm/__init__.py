"""RMSNorm for openinfer on a CPU, its sums in float64."""

from openinfer_exact_norm.provider import ExactNorm

OPENINFER_CONTRACT = 1

__all__ = ["ExactNorm"]
