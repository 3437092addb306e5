"""Several engines of one model as one: which of them gets a request, and an `EngineHandle` over all of them."""

from openinfer_core.replicas.held_prefixes import PrefixHoldings
from openinfer_core.replicas.prefix_router import PrefixRouter
from openinfer_core.replicas.routed_engine import RoutedEngine

__all__ = ["PrefixHoldings", "PrefixRouter", "RoutedEngine"]
