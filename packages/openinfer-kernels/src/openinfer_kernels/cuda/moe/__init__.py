"""Mixtures of experts: routing and grouped products."""
