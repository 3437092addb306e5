"""`openinfer serve`: a model behind an OpenAI-compatible API."""

import argparse
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path

from openinfer.commands.model_arguments import parse
from openinfer.commands.plan import check_lock, resolve
from openinfer.flags import add_flags, read_flags
from openinfer_server import ServerOptions
from openinfer_server import run as run_server


def run(argv: Sequence[str]) -> int:
    """Loads the model and serves it until SIGTERM or Ctrl-C; returns 1 if the engine died."""
    begin_s = time.monotonic()
    arguments = parse(argv, command="serve", description=__doc__ or "", configure=_configure)
    options = read_flags(arguments.namespace, ServerOptions, preset={"model_names": (arguments.model_name,)})
    logging.basicConfig(level=os.environ.get("OPENINFER_LOG_LEVEL", "INFO"), format="%(name)s: %(message)s")
    if arguments.namespace.locked is not None:
        check_lock(Path(arguments.namespace.locked), resolve(arguments))
    handle = arguments.family.launch(arguments.model_dir, arguments.options)

    def announce(url: str) -> None:
        print(f"openinfer: serving {options.model_names[0]} on {url} ({time.monotonic() - begin_s:.1f} s)", flush=True)

    return run_server(handle, arguments.model_dir, options, on_ready=announce)


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--locked", metavar="FILE", help="refuse to start unless the composition is the one in FILE")
    add_flags(parser, ServerOptions)
