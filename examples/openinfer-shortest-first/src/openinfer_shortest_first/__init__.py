"""A queue policy for openinfer: the shortest request first, and none waits forever."""

from openinfer_shortest_first.policy import AGE_TOKENS, ShortestFirst

OPENINFER_CONTRACT = 1

__all__ = ["AGE_TOKENS", "ShortestFirst"]
