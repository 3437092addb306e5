"""Qwen3, dense and mixtures: found by openinfer through the entry points `qwen3` and `qwen3_moe`."""

from openinfer_qwen3.family import Qwen3, Qwen3Moe

__all__ = ["Qwen3", "Qwen3Moe"]
