"""Gemma-2 and Gemma-3, the text models, for openinfer."""

from openinfer_gemma.family import Gemma

OPENINFER_CONTRACT = 1

__all__ = ["Gemma"]
