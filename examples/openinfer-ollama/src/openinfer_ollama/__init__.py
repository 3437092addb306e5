"""Two routes of Ollama's API on an openinfer server."""

from openinfer_ollama.endpoint import endpoints

__all__ = ["endpoints"]
