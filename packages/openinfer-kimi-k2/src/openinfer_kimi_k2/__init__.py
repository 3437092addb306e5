"""Kimi-K2 for openinfer."""
