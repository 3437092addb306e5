"""Llama, dense: a model family of a package outside openinfer."""

from openinfer_llama.family import Llama

OPENINFER_CONTRACT = 1

__all__ = ["Llama"]
