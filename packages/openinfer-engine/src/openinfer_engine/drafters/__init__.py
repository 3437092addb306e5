"""Drafters that are models: what they ask of the engine before it loads, their weights, their KV."""
