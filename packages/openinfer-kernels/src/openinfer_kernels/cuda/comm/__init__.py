"""Collectives across the GPUs of one machine."""
