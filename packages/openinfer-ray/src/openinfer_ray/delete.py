"""`openinfer ray delete`: ends an application in Ray Serve; its replicas answer what they have first."""

import argparse
import os
from collections.abc import Sequence

from openinfer.flags import add_flags, read_flags
from openinfer_core import Refused
from openinfer_core.process.logs import set_up_logs
from openinfer_ray import cluster
from openinfer_ray.bundles import Bundle
from openinfer_ray.options import LOCAL, RayOptions

_OF_SERVE = frozenset(
    {
        "max_replicas",
        "ray_servers",
        "replicas",
        "scale_down_after_s",
        "scale_up_after_s",
        "scale_waiting_tokens",
        "replica_cpus",
        "replica_health_period_s",
        "replica_routing",
        "replica_timeout_s",
        "replica_token_file",
    }
)


def run(argv: Sequence[str]) -> int:
    """Returns 0 when all replicas have ended; raises `Refused` if there is no such application."""
    parser = argparse.ArgumentParser(prog="openinfer ray delete", description=__doc__)
    add_flags(parser, RayOptions, skip=_OF_SERVE)
    options = read_flags(parser.parse_args(argv), RayOptions)
    if options.ray_address == LOCAL:
        raise Refused("a cluster that is started now has no application: --ray-address auto or HOST:PORT")
    set_up_logs(os.environ)
    cluster.connect(options, Bundle(cpus=1, gpus=(0,)))
    try:
        if not cluster.delete(options.ray_app):
            raise Refused(f"there is no application {options.ray_app} in Ray Serve")
    finally:
        cluster.leave()
    return 0
