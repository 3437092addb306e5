"""`openinfer serve --models FILE`: several models that take turns in the memory of one machine."""

import argparse
import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

from openinfer.commands.flag_parser import FlagParser
from openinfer.several.models_file import read_models_file
from openinfer_core import InvalidRequest, Refused
from openinfer_core.process.logs import LEVEL_VARIABLE, set_up_logs

FLAG = "--models"
LOOPBACK = ("127.0.0.1", "::1", "localhost")


def is_asked(argv: Sequence[str]) -> bool:
    """Whether these arguments of `serve` are for several models."""
    return any(each == FLAG or each.startswith(f"{FLAG}=") for each in argv)


def run(argv: Sequence[str]) -> int:
    """Serves the models of a file until SIGTERM or Ctrl-C."""
    from openinfer.several.running import serve_models

    namespace = _parse(argv)
    if namespace.host not in LOOPBACK:
        raise InvalidRequest(
            f"host is {namespace.host}: several models are served on loopback alone, without keys; put a proxy that "
            "asks for keys in front",
            field="host",
        )
    if not 0 <= namespace.port <= 65535:
        raise InvalidRequest(f"port is {namespace.port}; it must be between 0 and 65535", field="port")
    if namespace.log_level is not None:
        os.environ[LEVEL_VARIABLE] = namespace.log_level
    set_up_logs(os.environ)
    file = read_models_file(Path(namespace.models))
    names = ", ".join(model.name for model in file.models)

    def announce(url: str) -> None:
        print(f"openinfer: serving {names} on {url}, {file.max_awake} at a time", flush=True)

    try:
        return asyncio.run(serve_models(file, host=namespace.host, port=namespace.port, on_ready=announce))
    except OSError as error:
        raise Refused(f"{namespace.host}:{namespace.port} cannot be listened on: {error.strerror}") from error


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = FlagParser(prog="openinfer serve", description=__doc__)
    parser.add_argument(FLAG, metavar="FILE", required=True, help="TOML; see docs/reference/several-models.md")
    parser.add_argument("--host", default="127.0.0.1", help="an address of loopback (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one (default: 8000)")
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"), help="of all servers")
    parser.add_helps()
    return parser.parse_strictly(argv)
