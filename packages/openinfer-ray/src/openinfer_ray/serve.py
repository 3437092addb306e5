"""`openinfer ray serve`: replicas that Ray places, behind this process's server."""

import argparse
import functools
import logging
import os
import secrets
import signal
import threading
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from openinfer.commands.model_arguments import ModelArguments, parse
from openinfer.flags import add_flags, read_flags
from openinfer_core import InvalidRequest, Refused
from openinfer_core.errors import brought_by
from openinfer_core.process.logs import set_up_logs
from openinfer_ray import cluster
from openinfer_ray.application import join_application
from openinfer_ray.bundles import Bundle
from openinfer_ray.options import RayOptions
from openinfer_ray.ray_engine import RayEngine
from openinfer_ray.replica_spec import ReplicaSpec, Routing
from openinfer_ray.shares import AUTO, choose_shares, parse_shares, shares_of, text_of
from openinfer_server import ServerOptions

logger = logging.getLogger("openinfer")

_TOKEN_BYTES = 32
_ON_GPUS = "cuda"  # the engine's `--device`; a family without that option computes on CPUs


def run(argv: Sequence[str]) -> int:
    """Places the replicas and serves them until SIGTERM or Ctrl-C, which ends them too; returns the exit code.

    Raises:
        OpenInferError: what the user can mend.
    """
    from openinfer_server import frontend_parts, run_starting

    arguments = parse(argv, command="ray serve", description=__doc__ or "", configure=_configure)
    server = read_flags(arguments.namespace, ServerOptions, preset={"model_name": [arguments.model_name]})
    options = read_flags(arguments.namespace, RayOptions)
    set_up_logs(os.environ)
    _refuse_what_is_not_there(arguments.options, options, server)
    shares = shares_asked(arguments.options, options)
    if options.replica_routing is Routing.KV_EVENTS:
        _require_kv_events(arguments.options)
    frontend_parts(arguments.model_dir, arguments.family.name, server)  # a wrong name is told before anything starts
    spec = spec_of(arguments, options, server)

    def announce(url: str) -> None:
        name = server.model_name[0]
        print(f"openinfer: serving {name} on {url}, {options.replicas} replicas on Ray", flush=True)  # noqa: T201

    spec.read_digest_key(spec.read_token())  # a file that is not here is told before anything starts
    # In this thread: on Linux the processes of a cluster end with the thread that has started them.
    cluster.connect(options, bundle_of(arguments.options, options, shares))
    try:
        shares = shares or spread(arguments.options, options)
        bundle, spec = bundle_of(arguments.options, options, shares), msgspec.structs.replace(spec, shares=shares)
        launch = functools.partial(start, options, bundle, spec)
        if options.ray_servers:
            return _serve_through_proxies(options, bundle, spec, server)
        return run_starting(launch, arguments.model_dir, server, on_ready=announce)
    finally:
        cluster.leave()


def _serve_through_proxies(options: RayOptions, bundle: Bundle, spec: ReplicaSpec, server: ServerOptions) -> int:
    """Places replicas and servers, and ends them after SIGTERM or Ctrl-C."""
    stopped = threading.Event()
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, lambda _number, _frame: stopped.set())
    try:
        cluster.require_room(options, bundle)
        cluster.start_directory(options)
        cluster.start_proxies(server)
        cluster.deploy(options, bundle, spec)
        cluster.deploy_servers(options, spec, server)
        place = f"[{server.host}]" if ":" in server.host else server.host
        engines = f"{options.replicas} replicas and {options.ray_servers} servers on Ray"
        url = f"http://{place}:{server.port}"
        print(f"openinfer: serving {server.model_name[0]} on {url}, {engines}", flush=True)  # noqa: T201
        stopped.wait()
    finally:
        _end(spec.app)
    return 0


def bundle_of(options: msgspec.Struct, replicas: RayOptions, shares: tuple[int, ...] = ()) -> Bundle:
    """What one replica of these options of a family needs; `shares` are ranks of each of its nodes, none: of one."""
    shares = shares or (_num_ranks(options),)
    return Bundle(cpus=replicas.replica_cpus, gpus=shares if _on_gpus(options) else (0,) * len(shares))


def shares_asked(options: msgspec.Struct, replicas: RayOptions) -> tuple[int, ...]:
    """Ranks of each node of a replica; none if all are on one, or the cluster's nodes decide."""
    if replicas.ranks_per_node in (None, AUTO):
        return ()
    try:
        return shares_of(parse_shares(replicas.ranks_per_node), ranks=_num_ranks(options))
    except ValueError as error:
        raise InvalidRequest(
            f"ranks_per_node: {error} of --tensor-parallel-size; without it they are on one node",
            field="ranks_per_node",
        ) from error


def spread(options: msgspec.Struct, replicas: RayOptions) -> tuple[int, ...]:
    """`shares_asked` of the nodes that there are, where they decide; raises `Refused` if replicas fit in no way."""
    if replicas.ranks_per_node != AUTO or not _on_gpus(options):
        return ()
    nodes, ranks = cluster.node_resources(), _num_ranks(options)
    shares = choose_shares(nodes, ranks=ranks, cpus=replicas.replica_cpus, most=replicas.most_replicas)
    logger.info("each replica has %s ranks on %d nodes", text_of(shares), len(shares))
    return shares if len(shares) > 1 else ()


def _on_gpus(options: msgspec.Struct) -> bool:
    return str(getattr(options, "device", "")) == _ON_GPUS


def _num_ranks(options: msgspec.Struct) -> int:
    tensor: int = getattr(options, "tensor_parallel_size", 1)
    data: int = getattr(options, "data_parallel_size", 1)
    return tensor * data


def spec_of(arguments: ModelArguments, options: RayOptions, server: ServerOptions) -> ReplicaSpec:
    """What each replica is told."""
    token = None if options.replica_token_file else secrets.token_hex(_TOKEN_BYTES)
    key_file: str | None = getattr(arguments.options, "kv_key_file", None)
    return ReplicaSpec(
        app=options.ray_app,
        family=arguments.family.name,
        model_dir=str(arguments.model_dir.resolve()),
        options=msgspec.Raw(msgspec.json.encode(arguments.options)),
        cpus=options.replica_cpus,
        token=token,
        token_file=str(Path(options.replica_token_file).resolve()) if options.replica_token_file else "",
        drain_deadline_s=server.drain_deadline_s,
        max_step_age_s=server.health_max_step_age_s,
        timeout_s=options.replica_timeout_s,
        routing=options.replica_routing,
        kv_key_file=str(Path(key_file).resolve()) if key_file else "",
    )


def start(options: RayOptions, bundle: Bundle, spec: ReplicaSpec) -> RayEngine:
    """Starts all replicas, joins them, and returns them as one engine, which ends them when it is closed.

    Raises:
        OpenInferError: they cannot be had.
    """
    try:
        cluster.require_room(options, bundle)
        cluster.start_directory(options)
        cluster.deploy(options, bundle, spec)
        return join_application(spec, end=functools.partial(_end, spec.app))
    except BaseException:
        _end(spec.app)
        raise


def _end(app: str) -> None:
    try:
        cluster.delete(app)
    except Exception:  # Ray raises many kinds; a cluster that is gone has ended the replicas
        logger.exception("the application %s could not be deleted", app)


def _refuse_what_is_not_there(of_family: msgspec.Struct, options: RayOptions, server: ServerOptions) -> None:
    if options.ray_servers:
        _refuse_with_proxies(server)
    if server.workers > 1:
        raise InvalidRequest("replicas on Ray are served by one process: --workers 1", field="workers")
    if getattr(of_family, "rank_host", None) not in (None, "process", "thread"):
        raise InvalidRequest(
            "Ray places the ranks of a replica, on several nodes with --ranks-per-node: leave --rank-host out",
            field="rank_host",
        )
    if options.ranks_per_node is not None:
        _check_nodes(of_family)


def _check_nodes(of_family: Any) -> None:
    if getattr(of_family, "data_parallel_size", 1) > 1:
        raise InvalidRequest("data-parallel ranks are on one node: leave --ranks-per-node out", field="ranks_per_node")
    if getattr(of_family, "rank_host", None) == "thread":
        raise InvalidRequest("ranks in threads are on one node: leave --rank-host out", field="rank_host")


def _refuse_with_proxies(server: ServerOptions) -> None:
    """What a server behind Ray Serve's proxies does not do itself."""
    if server.tls_cert_file:
        raise InvalidRequest(
            "Ray Serve's proxies speak plain HTTP: TLS needs a proxy before them", field="tls_cert_file"
        )
    if not server.port:
        raise InvalidRequest("Ray Serve's proxies need a port that is told: --port above 0", field="port")


def _require_kv_events(options: msgspec.Struct) -> None:
    """Raises `InvalidRequest`, or `Refused` without pyzmq, if these replicas could not say what they hold."""
    of_family: Any = options
    otherwise = "give --replica-routing sent"
    for name in ("kv_events", "kv_key_file"):
        if not hasattr(options, name):
            raise InvalidRequest(f"this family's engine does not tell of its KV; {otherwise}", field="replica_routing")
    if of_family.kv_events is not None:
        raise InvalidRequest(
            f"replicas tell this server of their KV at places that it chooses; for a router of yours, {otherwise}",
            field="kv_events",
        )
    if not getattr(options, "prefix_cache", True):
        raise InvalidRequest(f"without a prefix cache there is nothing to tell of; {otherwise}", field="prefix_cache")
    if getattr(options, "data_parallel_size", 1) > 1:
        raise InvalidRequest(f"data-parallel ranks do not tell of their KV; {otherwise}", field="data_parallel_size")
    if getattr(options, "kv_tier", None) and of_family.kv_key_file is None:
        raise InvalidRequest(
            "replicas that tell of their KV name it with one key, and with a KV tier that key must last: give "
            f"--kv-key-file, or {otherwise}",
            field="kv_key_file",
        )
    if find_spec("zmq") is None:
        raise Refused(f"routing by KV events needs pyzmq: {brought_by('--kv-events')}; or {otherwise}")


def _configure(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, RayOptions)
    add_flags(parser, ServerOptions)
