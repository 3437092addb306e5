"""openinfer-mistral-calls: tool calls as Mistral's models write them."""

from openinfer_mistral_calls.parser import MistralParser

__all__ = ["MistralParser"]
