"""The subcommands: finds one, turns errors into one line, returns the exit code."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import version

from openinfer_core import OpenInferError, find_plugin, list_plugins
from openinfer_core.contracts import one_release, require_one_release
from openinfer_core.process.processors import usable_processors

# entry points of further subcommands: functions of what follows the name, which return the exit code
COMMANDS = "openinfer.commands"

# modules next to this one, loaded when they are chosen, and what they do
_COMMANDS = {
    "serve": "serve a model through an OpenAI-compatible API",
    "pull": "download a model of the Hugging Face hub into the cache",
    "chat": "talk to a model on the terminal, in this process or on a server",
    "generate": "continue a prompt on the terminal",
    "plan": "print what would serve a model: packages, kernels, memory; loads nothing",
    "bench": "run a benchmark of openinfer-bench",
    "completion": "print what completes commands and flags in bash, zsh or fish",
    "demo": "load the tiny model, stream a completion and a chat turn",
}

EXIT_USAGE = 2


def run(arguments: Sequence[str]) -> int:
    """Runs a subcommand; returns its exit code, 2 for what the user can mend."""
    # those of other packages are looked up only where they can matter
    texts = _COMMANDS if arguments and arguments[0] in _COMMANDS else all_commands()
    parser = argparse.ArgumentParser(
        prog="openinfer",
        description="An LLM inference engine that you can take apart.",
        epilog="\n".join(f"  {name:10} {text}" for name, text in texts.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"openinfer {version('openinfer')}")
    parser.add_argument("command", choices=tuple(texts), metavar="COMMAND", help="one of the commands below")
    chosen = parser.parse_args(arguments[:1])
    _leave_a_core()
    try:
        require_one_release("openinfer")
        with one_release():
            return _find(chosen.command)(arguments[1:])
    except OpenInferError as error:
        print(f"openinfer {chosen.command}: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return 130


def all_commands() -> dict[str, str]:
    """Each command, those of other packages too, and what it does."""
    return _COMMANDS | {plugin.name: f"of {plugin.origin}" for plugin in list_plugins(COMMANDS)}


def _find(name: str) -> Callable[[Sequence[str]], int]:
    if name in _COMMANDS:
        return import_module(f"openinfer.commands.{name}").run
    return find_plugin(COMMANDS, name).load()


def _leave_a_core() -> None:
    """Keeps NumPy's OpenBLAS off one core, before it is loaded, here and in the engine's process.

    Its threads spin while they wait for each other: with a busy frontend on a machine of two cores, a small product
    was seen to take 44 ms instead of 0.2 ms at the 90th percentile.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", str(max(1, usable_processors() - 1)))
