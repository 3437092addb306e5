"""`openinfer ray`: replicas of a model on a Ray cluster.

openinfer ray serve MODEL --replicas N --tensor-parallel-size T [the options of openinfer serve]
openinfer ray delete [--ray-app NAME] [--ray-address ADDRESS]
"""

import argparse
import sys
from collections.abc import Sequence

from openinfer_core import Refused
from openinfer_ray import delete, serve

OPENINFER_CONTRACT = 1

_COMMANDS = {"delete": delete.run, "serve": serve.run}


def run(argv: Sequence[str]) -> int:
    """Runs a subcommand; returns its exit code.

    Raises:
        OpenInferError: what the user can mend.
    """
    parser = argparse.ArgumentParser(
        prog="openinfer ray",
        description=(__doc__ or "").partition("\n")[0],
        epilog="serve: places replicas and serves them; delete: ends an application that a server has left behind",
    )
    parser.add_argument("command", choices=tuple(_COMMANDS), metavar="serve|delete")
    chosen = parser.parse_args(argv[:1])
    if sys.platform != "linux":
        raise Refused("replicas on Ray need Linux")
    return _COMMANDS[chosen.command](argv[1:])
