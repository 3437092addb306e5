"""Qwen3, all dense sizes: found by openinfer through the entry point `qwen3` of the group `openinfer.models`."""

from openinfer_qwen3.family import Qwen3

__all__ = ["Qwen3"]
