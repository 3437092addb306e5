"""A queue policy for openinfer: the shortest request first, and none waits forever."""

from openinfer_shortest_first.policy import AGE_TOKENS, ShortestFirst

__all__ = ["AGE_TOKENS", "ShortestFirst"]
