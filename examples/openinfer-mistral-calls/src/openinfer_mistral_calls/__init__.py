"""openinfer-mistral-calls: tool calls as Mistral's models write them."""

from openinfer_mistral_calls.parser import MistralParser

OPENINFER_CONTRACT = 1

__all__ = ["MistralParser"]
