"""openinfer: a small, fast LLM inference engine that you can take apart."""

from openinfer.completion import Completion
from openinfer.llm import LLM, GenerationFailed

__all__ = ["LLM", "Completion", "GenerationFailed"]
