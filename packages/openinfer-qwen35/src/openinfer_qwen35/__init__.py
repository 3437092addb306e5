"""Qwen3.5, all dense sizes, text path: found by openinfer through the entry point `qwen35` of `openinfer.models`."""

from openinfer_qwen35.family import Qwen35

__all__ = ["Qwen35"]
