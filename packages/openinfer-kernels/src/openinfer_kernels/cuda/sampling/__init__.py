"""Sampling: each slot's state on the device, inputs of steps, drawn tokens and log-probabilities."""
