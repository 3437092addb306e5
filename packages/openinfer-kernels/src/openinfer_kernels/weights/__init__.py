"""Weights on their way to a device: plain and quantised ones, and their grids of scales."""
