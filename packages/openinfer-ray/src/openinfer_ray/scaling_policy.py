"""`WaitingTokensPolicy`: what Ray Serve's controller asks for a number of replicas.

Ray Serve carries this module by value into the controller, where a class made by msgspec would come apart: what is
needed is imported there, when it is called.
"""

from collections.abc import Mapping
from typing import Any


class WaitingTokensPolicy:
    """Is made by the controller from the fields of `openinfer_ray.scaling.ScaleLimits`."""

    def __init__(self, **limits: Any) -> None:
        self._limits = limits

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """The number of replicas, and what is to be remembered."""
        import msgspec

        from openinfer_ray.scaling import BUSY, WAITING_TOKENS, ScaleLimits, ScaleLoad, ScaleState, decide

        told: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}
        load = ScaleLoad(
            waiting_tokens=sum(told.get(WAITING_TOKENS, {}).values()),
            busy=sum(told.get(BUSY, {}).values()),
            replicas=context.current_num_replicas,
        )
        names = ScaleState.__struct_fields__
        state = msgspec.convert({name: context.policy_state.get(name) for name in names}, ScaleState)
        limits = msgspec.convert(self._limits, ScaleLimits)
        target, state = decide(
            state, load, target=context.target_num_replicas, now_s=context.current_time, limits=limits
        )
        return target, msgspec.to_builtins(state)
