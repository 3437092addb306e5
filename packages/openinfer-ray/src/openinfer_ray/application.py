"""`join_application`: the replicas of an application that runs, as one engine for a server."""

import functools
import logging
from collections.abc import Callable

from openinfer_core import EngineHandle, OpenInferError, Refused
from openinfer_ray import cluster
from openinfer_ray.following import Times
from openinfer_ray.ray_engine import RayEngine, join_replica
from openinfer_ray.replica_spec import ReplicaAddress, ReplicaSpec, ReplicaState, Routing

logger = logging.getLogger("openinfer")


def join_application(spec: ReplicaSpec, *, end: Callable[[], None]) -> RayEngine:
    """Joins the replicas that are listed; others follow.

    Args:
        spec: what the replicas run.
        end: see `RayEngine`.

    Raises:
        Refused: none can be reached, or they do not say what routing needs.
        OpenInferError: what the user can mend.
    """
    token = spec.read_token()
    listing, join = cluster.listing_of(spec.app), functools.partial(join_replica, token=token)
    joined: dict[str, EngineHandle] = {}
    for replica in listing():
        if replica.state is ReplicaState.SERVING:
            _join_first(joined, replica, join)
    if not joined:
        raise Refused("no replica of the application can be reached from this machine")
    routing = None
    if spec.routing is Routing.KV_EVENTS:
        from openinfer_ray.kv_events.routing import KvRouting  # needs pyzmq

        info = next(iter(joined.values())).info
        routing = KvRouting(info, key=spec.read_digest_key(token), token=token, patience_s=spec.timeout_s)
    times = Times(patience_s=spec.timeout_s)
    return RayEngine(joined, listing=listing, join=join, end=end, times=times, routing=routing)


def _join_first(
    joined: dict[str, EngineHandle], replica: ReplicaAddress, join: Callable[[ReplicaAddress], EngineHandle]
) -> None:
    try:
        joined[replica.name] = join(replica)
    except (OpenInferError, OSError) as error:
        logger.warning("replica %s cannot be reached yet: %s", replica.name, error)
