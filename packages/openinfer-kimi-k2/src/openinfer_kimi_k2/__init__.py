"""Kimi-K2: found by openinfer through the entry point `kimi_k2` of the group `openinfer.models`."""

from openinfer_kimi_k2.family import KimiK2

__all__ = ["KimiK2"]
