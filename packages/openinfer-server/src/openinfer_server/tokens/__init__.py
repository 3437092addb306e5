"""Routes that speak in token ids, with vLLM's names."""
