"""Two routes of Ollama's API on an openinfer server."""

from openinfer_ollama.endpoint import endpoints

OPENINFER_CONTRACT = 1

__all__ = ["endpoints"]
