"""`openinfer rank`: gives the GPUs of this node to an engine whose head runs on another one.

openinfer rank --join HEAD:7000 --token-file FILE --ranks 8 [--model DIR] [--node NAME] [--node-index N]
"""

import argparse
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from openinfer_core import InvalidRequest, Refused
from openinfer_core.process.addresses import parse_address
from openinfer_core.process.logs import set_up_logs
from openinfer_core.process.mutual_proof import read_token
from openinfer_engine.ranks.joining import Joining, join_head

OPENINFER_CONTRACT = 1

_MAX_RANKS = 1024
_EXIT_FAILED = 1


def run(argv: Sequence[str]) -> int:
    """Joins, and waits for the engine's end; returns 0 if it closed, 1 if it or a rank of this node failed.

    Raises:
        InvalidRequest: an argument is wrong.
        Refused: the head cannot be reached, or does not take the ranks.
    """
    arguments = _parser().parse_args(argv)
    if sys.platform == "win32":
        raise Refused("ranks of several machines need a POSIX system")
    if not 1 <= arguments.ranks <= _MAX_RANKS or not 0 <= arguments.gpu < _MAX_RANKS:
        raise InvalidRequest(f"--ranks and --gpu must be between 0 and {_MAX_RANKS}", field="ranks")
    if arguments.model is not None and not arguments.model.is_dir():
        raise InvalidRequest(f"--model {arguments.model} is no folder", field="model")
    set_up_logs(os.environ)
    address = parse_address(arguments.join, field="join")
    token = read_token(arguments.token_file, field="token_file")
    nodes = [
        Joining(name=arguments.node, index=arguments.node_index, gpu=gpu)
        for gpu in range(arguments.gpu, arguments.gpu + arguments.ranks)
    ]
    codes = join_head(address, nodes, token=token, model_dir=arguments.model, wait_s=arguments.wait_s)
    return _EXIT_FAILED if any(codes) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="openinfer rank", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--join", required=True, metavar="HOST:PORT", help="where the head listens for ranks")
    parser.add_argument(
        "--token-file", required=True, type=Path, metavar="FILE", help="the secret that all nodes share"
    )
    parser.add_argument("--model", type=Path, metavar="DIR", help="the model folder here, if its path is another one")
    parser.add_argument(
        "--ranks", type=int, default=1, metavar="N", help="ranks of this node, one GPU each (default: 1)"
    )
    parser.add_argument("--gpu", type=int, default=0, metavar="N", help="GPU of the first of them (default: 0)")
    parser.add_argument("--node", default=socket.gethostname(), metavar="NAME", help="by default the host name")
    parser.add_argument("--node-index", type=int, metavar="N", help="order of nodes: SLURM_NODEID, LWS_WORKER_INDEX")
    parser.add_argument("--wait-s", type=int, default=600, metavar="N", help="for the head to listen (default: 600)")
    return parser
