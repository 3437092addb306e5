"""What is asked of Ray: a cluster, room in it, an application of replicas, and the actor that has their addresses.

Ray is imported here alone, and in the processes that it starts for us.
"""

import contextlib
import functools
import importlib
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from openinfer_core import Refused
from openinfer_core.process.processors import usable_processors
from openinfer_ray.bundles import Bundle, replicas_on
from openinfer_ray.directory import Directory, read_listing
from openinfer_ray.options import LOCAL, RayOptions
from openinfer_ray.replica_spec import ReplicaAddress, ReplicaSpec
from openinfer_ray.scaling_policy import WaitingTokensPolicy
from openinfer_server import ServerOptions

logger = logging.getLogger("openinfer.engine")

NAMESPACE = "openinfer"
RECONNECT_VARIABLE = "RAY_gcs_rpc_server_reconnect_timeout_s"
"""How long each of Ray's processes, this one too, outlives the control store; Ray's own value is 60 s."""
DEPLOYMENT = "replica"
_RECONNECT_S = 7 * 86_400
_ANSWER_S = 10.0  # what the actor of addresses may take
_MOST_REQUESTS = 100_000
_OBJECT_STORE_BYTES = 80 << 20  # of a cluster that we start: addresses alone go through it
_PERIODS_UNTIL_FORGOTTEN = 5
_LEAST_FORGET_S = 15.0
_CONSTRUCTOR_ATTEMPTS = 2
_HEALTH_TIMEOUT_S = 20.0  # beyond what an engine may take to answer, for a look at a replica
_TOLD_EVERY_S = 1.0  # by each replica, of what waits
_LOOK_BACK_S = 5.0  # over which that is averaged
_SHUTDOWN_GRACE_S = 10.0  # beyond what requests may take, for a replica to end


def import_ray(module: str = "ray") -> Any:
    """A module of Ray; raises `Refused` if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise Refused(
            f"Ray Serve is not installed ({error}): pip install 'ray[serve]>=2.60,<3'. No package of openinfer "
            "requires it, because its extra brings a binary of HAProxy, which is under the GPL"
        ) from error


def connect(options: RayOptions, bundle: Bundle) -> None:
    """Connects this process to the cluster, or starts one that ends with it; raises `Refused`."""
    started: dict[str, Any] = {}
    if options.ray_address == LOCAL:
        cpus = max(usable_processors(), options.most_replicas * bundle.cpus)  # on one machine they share what there is
        started = {"num_cpus": cpus, "include_dashboard": False, "object_store_memory": _OBJECT_STORE_BYTES}
    connect_driver(options.ray_address, **started)
    import_ray("ray.serve")
    ray: Any = import_ray()
    logger.info("Ray %s at %s", ray.__version__, ray.get_runtime_context().gcs_address)


def connect_driver(address: str, **started: Any) -> None:
    """Connects this process, with what a cluster that it starts is told; raises `Refused`."""
    # Read when Ray is imported, and inherited by what a new cluster starts.
    os.environ.setdefault(RECONNECT_VARIABLE, str(_RECONNECT_S))
    ray: Any = import_ray()
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.WARNING, **started)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise Refused(f"the Ray cluster {address} cannot be had: {error}") from error


def node_resources() -> list[Mapping[str, float]]:
    """What each node has, were it empty."""
    ray: Any = import_ray()
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def require_room(options: RayOptions, bundle: Bundle) -> None:
    """Raises `Refused` if the nodes that are there could not hold all replicas, were they empty.

    Ray would wait for more nodes, without an end.
    """
    nodes = node_resources()
    room = replicas_on(nodes, bundle, most=options.most_replicas)
    if room < options.most_replicas:
        have = "; ".join(f"{node.get('CPU', 0):g} CPUs and {node.get('GPU', 0):g} GPUs" for node in nodes)
        gpus = " + ".join(map(str, bundle.gpus))
        of = "one node" if len(bundle.gpus) == 1 else f"{len(bundle.gpus)} nodes"
        raise Refused(
            f"{options.most_replicas} replicas, each with {gpus} GPUs of {of} and {bundle.cpus} CPUs of each, do not "
            f"fit: the cluster has room for {room}. Its nodes have: {have}" + _advice(nodes, bundle)
        )


def _advice(nodes: Sequence[Mapping[str, float]], bundle: Bundle) -> str:
    """What would fit, where no node has the GPUs of a replica."""
    largest = math.floor(max((node.get("GPU", 0.0) for node in nodes), default=0.0))
    gpus, *others = bundle.gpus
    if others or not 0 < largest < gpus:
        return ""
    return f". No node has {gpus} GPUs: --ranks-per-node auto spreads the ranks of a replica over several"


def deploy(options: RayOptions, bundle: Bundle, spec: ReplicaSpec) -> None:
    """Runs the application, in the place of one of the same name, and waits until all replicas are loaded.

    Raises:
        Refused: a replica could not start; with what Ray knows of it.
    """
    from openinfer_ray.replica import Replica

    serve: Any = import_ray("ray.serve")
    if not options.ray_servers:
        serve.start(proxy_location="Disabled")  # requests do not come through Ray
    deployment = serve.deployment(Replica).options(
        name=DEPLOYMENT,
        **number_of_replicas(options),
        placement_group_bundles=bundle.resources,
        placement_group_strategy="STRICT_PACK" if len(bundle.gpus) == 1 else "STRICT_SPREAD",
        ray_actor_options={"num_cpus": bundle.cpus, "num_gpus": bundle.gpus[0]},
        health_check_period_s=options.replica_health_period_s,
        health_check_timeout_s=spec.timeout_s + _HEALTH_TIMEOUT_S,
        graceful_shutdown_timeout_s=spec.drain_deadline_s + _SHUTDOWN_GRACE_S,
        max_constructor_retry_count=_CONSTRUCTOR_ATTEMPTS,
    )
    try:
        serve.run(deployment.bind(msgspec.json.encode(spec)), name=options.ray_app, route_prefix=None)
    except RuntimeError as error:
        raise Refused(f"the replicas did not start: {error}") from error


def deploy_servers(options: RayOptions, spec: ReplicaSpec, server: ServerOptions) -> None:
    """Runs servers of the application, which is there, and Ray Serve's proxies before them, until all are ready.

    Raises:
        Refused: one could not start; with what Ray knows of it.
    """
    from openinfer_ray.ingress import Ingress

    serve: Any = import_ray("ray.serve")
    deployment = serve.deployment(serve.ingress()(Ingress)).options(
        name="server",
        num_replicas=options.ray_servers,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=_MOST_REQUESTS,  # the server has bounds of its own
        graceful_shutdown_timeout_s=server.drain_deadline_s + _SHUTDOWN_GRACE_S,
        max_constructor_retry_count=_CONSTRUCTOR_ATTEMPTS,
    )
    bound = deployment.bind(msgspec.json.encode(spec), msgspec.json.encode(server))
    try:
        serve.run(bound, name=servers_of(options.ray_app), route_prefix="/")
    except RuntimeError as error:
        raise Refused(f"the servers did not start: {error}") from error


def start_proxies(server: ServerOptions) -> None:
    """Starts Ray Serve with its proxies; of a Ray Serve that runs already the proxies stay as they are."""
    serve: Any = import_ray("ray.serve")
    serve.start(proxy_location="EveryNode", http_options={"host": server.host, "port": server.port})


def servers_of(app: str) -> str:
    """The name of the application of its servers."""
    return f"{app}-servers"


def number_of_replicas(options: RayOptions) -> dict[str, Any]:
    """What Ray Serve is told of how many there are."""
    limits = options.scale_limits
    if limits is None:
        return {"num_replicas": options.replicas}
    policy = {
        "policy_function": f"{WaitingTokensPolicy.__module__}:{WaitingTokensPolicy.__name__}",
        "policy_kwargs": msgspec.to_builtins(limits),
    }
    autoscaling = {
        "min_replicas": limits.min_replicas,
        "max_replicas": limits.max_replicas,
        "initial_replicas": limits.min_replicas,
        "metrics_interval_s": _TOLD_EVERY_S,
        "look_back_period_s": _LOOK_BACK_S,
        "upscale_delay_s": 0.0,  # the policy has delays of its own
        "downscale_delay_s": 0.0,
        "policy": policy,
    }
    return {"autoscaling_config": autoscaling}


def delete(app: str) -> bool:
    """Ends an application: its servers and replicas answer what they have first. Returns whether there was one."""
    serve: Any = import_ray("ray.serve")
    there = serve.status().applications
    if servers_of(app) in there:
        serve.delete(servers_of(app))
    if app not in there:
        return False
    serve.delete(app)
    ray: Any = import_ray()
    with contextlib.suppress(ValueError):  # there is no such actor
        ray.kill(ray.get_actor(_directory_name(app), namespace=NAMESPACE))
    return True


def own_group() -> tuple[str, str]:
    """The cluster's address, and the id of the placement group that this actor is in."""
    ray: Any = import_ray()
    groups: Any = import_ray("ray.util")
    return ray.get_runtime_context().gcs_address, groups.get_current_placement_group().id.hex()


def leave() -> None:
    """Ends the connection to the cluster, and a cluster that `connect` started."""
    import_ray().shutdown()


def start_directory(options: RayOptions) -> None:
    """Starts the actor that has the addresses; one that is there is kept."""
    ray: Any = import_ray()
    forget_s = max(_LEAST_FORGET_S, _PERIODS_UNTIL_FORGOTTEN * options.replica_health_period_s)
    actor = ray.remote(num_cpus=0, max_restarts=-1)(Directory)
    named = {"name": _directory_name(options.ray_app), "namespace": NAMESPACE, "get_if_exists": True}
    ray.get(actor.options(lifetime="detached", **named).remote(forget_s).listing.remote(), timeout=60)


def listing_of(app: str) -> Callable[[], list[ReplicaAddress]]:
    """Asks the actor for the addresses; what it returns blocks, and raises what Ray raises."""
    return functools.partial(_listing, app)


def announce(app: str, address: ReplicaAddress) -> None:
    """Tells the actor an address; raises what Ray raises."""
    ray: Any = import_ray()
    ray.get(_directory(app).announce.remote(msgspec.json.encode(address)), timeout=_ANSWER_S)


def _listing(app: str) -> list[ReplicaAddress]:
    ray: Any = import_ray()
    return read_listing(ray.get(_directory(app).listing.remote(), timeout=_ANSWER_S))


def _directory(app: str) -> Any:
    ray: Any = import_ray()
    return ray.get_actor(_directory_name(app), namespace=NAMESPACE)


def _directory_name(app: str) -> str:
    return f"openinfer-replicas-{app}"
