"""How many replicas there should be, by the tokens that wait in their queues.

    steady ─► more waits than replicas should have ─► for up_after_s ─► as many replicas as that needs; settling
           ─► nothing waits, and one less would do ─► for down_after_s ─► one less; settling
    settling ─► as many replicas run as were asked for, or loading has taken too long ─► steady

`decide` is pure: what it knows goes in and comes out, times included, so that two runs of one sequence agree. Ray
Serve's controller calls it through `openinfer_ray.scaling_policy`, in a process of its own: it goes on when a server
ends. A replica that is given up answers what it has first (`Replica.__del__`).
"""

import math

import msgspec

WAITING_TOKENS = "waiting_tokens"
BUSY = "busy"
"""Of what each replica tells (`Replica.record_autoscaling_stats`)."""
_SETTLE_S = 900.0  # what a replica may take to load before more are asked for
_FULL = 0.8  # of the rows of all but one replica: so far one less would do


class ScaleLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a user chose."""

    min_replicas: int
    max_replicas: int
    waiting_tokens: int
    """That a replica should have at most."""
    up_after_s: float
    down_after_s: float


class ScaleLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What replicas tell, all together."""

    waiting_tokens: float
    busy: float
    """Running sequences, as so many replicas full of them."""
    replicas: int
    """That run."""


class ScaleState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is remembered between two decisions."""

    more_since_s: float | None = None
    less_since_s: float | None = None
    asked_s: float | None = None
    """When the number was changed last, until as many run."""


def decide(
    state: ScaleState, load: ScaleLoad, *, target: int, now_s: float, limits: ScaleLimits
) -> tuple[int, ScaleState]:
    """How many replicas there should be.

    Args:
        state: of the last decision.
        load: at this moment.
        target: as was decided last.
        now_s: of a clock that does not jump back.
        limits: that hold.
    """
    bounded = min(max(target, limits.min_replicas), limits.max_replicas)
    if bounded != target:
        return bounded, ScaleState(asked_s=now_s)
    if state.asked_s is not None and load.replicas != target and now_s - state.asked_s < _SETTLE_S:
        return target, ScaleState(asked_s=state.asked_s)
    wanted = _wanted(load, target, limits)
    more_since_s = _since(state.more_since_s, now_s, holds=wanted > target)
    less_since_s = _since(state.less_since_s, now_s, holds=wanted < target)
    if more_since_s is not None and now_s - more_since_s >= limits.up_after_s:
        return wanted, ScaleState(asked_s=now_s)
    if less_since_s is not None and now_s - less_since_s >= limits.down_after_s:
        return target - 1, ScaleState(asked_s=now_s)
    return target, ScaleState(more_since_s=more_since_s, less_since_s=less_since_s)


def _wanted(load: ScaleLoad, target: int, limits: ScaleLimits) -> int:
    if load.waiting_tokens > limits.waiting_tokens * target:
        return min(math.ceil(load.waiting_tokens / limits.waiting_tokens), limits.max_replicas)
    one_less_would_do = load.busy <= _FULL * (target - 1)
    if target > limits.min_replicas and not load.waiting_tokens and one_less_would_do:
        return target - 1
    return target


def _since(since_s: float | None, now_s: float, *, holds: bool) -> float | None:
    if not holds:
        return None
    return now_s if since_s is None else since_s
