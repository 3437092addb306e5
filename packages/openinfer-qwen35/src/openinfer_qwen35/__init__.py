"""Qwen3.5, dense and mixtures: found by openinfer through the entry points `qwen35` and `qwen35_moe`."""

from openinfer_qwen35.family import Qwen35, Qwen35Moe

__all__ = ["Qwen35", "Qwen35Moe"]
