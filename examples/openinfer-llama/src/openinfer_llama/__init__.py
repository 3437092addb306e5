"""Llama, dense: a model family of a package outside openinfer."""

from openinfer_llama.family import Llama

__all__ = ["Llama"]
