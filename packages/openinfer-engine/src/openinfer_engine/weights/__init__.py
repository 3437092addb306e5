"""Weights: checkpoints, random ones, and how each rank gets its share of them."""
