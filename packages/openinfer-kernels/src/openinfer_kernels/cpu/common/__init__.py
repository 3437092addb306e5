"""Embedding and weights in host memory."""
