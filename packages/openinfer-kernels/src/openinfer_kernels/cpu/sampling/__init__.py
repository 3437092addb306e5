"""Sampling: changes of logits, the draw, and log-probabilities."""
