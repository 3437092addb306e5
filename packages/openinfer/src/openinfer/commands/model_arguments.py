"""The arguments that every command which loads a model shares: `--model`, `--family` and the family's own options."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from openinfer.commands.flag_parser import FlagParser
from openinfer.flags import add_flags, read_flags
from openinfer.models import find_family, find_model_dir, name_of
from openinfer_core import InvalidRequest, ModelFamily
from openinfer_core.plugins import Plugin


@dataclass(frozen=True, slots=True)
class ModelArguments:
    """A command line, resolved."""

    model_name: str  # what clients call it
    model_dir: Path
    family: ModelFamily
    plugin: Plugin
    options: msgspec.Struct
    namespace: argparse.Namespace


def parse(
    argv: Sequence[str],
    *,
    command: str,
    description: str,
    configure: Callable[[argparse.ArgumentParser], None],
    positional: bool = True,
) -> ModelArguments:
    """Finds the model first, since its family decides which flags there are; then parses everything strictly.

    Args:
        argv: what follows the command's name.
        command: its name.
        description: for its help.
        configure: adds the command's own flags.
        positional: whether the first argument may be the model.

    Raises:
        InvalidRequest: a flag's value is wrong.
        UnclaimedModel, InvalidCheckpoint, PluginError: see `find_family`.
    """
    if positional:
        argv = _with_flag(argv)
    first = _parser(command, description)
    chosen, _ = first.parse_known_args(argv)
    if chosen.model is None:
        full = _parser(command, description)
        configure(full)
        full.add_helps()
        full.epilog = "With --model, --help also lists the options of the family that serves it."
        full.parse_strictly(argv)
        raise InvalidRequest(
            "--model is missing: a Hugging Face model folder, the name of a repository (ORG/NAME), or tiny",
            field="model",
        )
    model_dir = find_model_dir(chosen.model, revision=chosen.revision, offline=chosen.offline, family=chosen.family)
    family, plugin = find_family(model_dir, chosen.family)
    parser = complete_parser(command, configure, [family.options_type], description=description)
    namespace = parser.parse_strictly(argv)
    return ModelArguments(
        model_name=name_of(chosen.model),
        model_dir=model_dir,
        family=family,
        plugin=plugin,
        options=read_flags(namespace, family.options_type),
        namespace=namespace,
    )


def _with_flag(argv: Sequence[str]) -> Sequence[str]:
    """The command line with `--model MODEL` for a first argument `MODEL`; further back it could be a flag's value."""
    if not argv or argv[0].startswith("-"):
        return argv
    if any(each == "--model" or each.startswith("--model=") for each in argv):
        raise InvalidRequest(f"the model is given twice: as {argv[0]!r} and as --model", field="model")
    return ["--model", *argv]


def complete_parser(
    command: str,
    configure: Callable[[argparse.ArgumentParser], None],
    options: Sequence[type[msgspec.Struct]],
    *,
    description: str = "",
) -> FlagParser:
    """The parser of a command, with the options of one or several families."""
    parser = _parser(command, description)
    configure(parser)
    known: set[str] = set()
    for struct in options:
        fields = {field.name for field in msgspec.structs.fields(struct)}
        add_flags(parser, struct, skip=frozenset(fields & known))
        known |= fields
    parser.add_helps()
    return parser


def _parser(command: str, description: str) -> FlagParser:
    parser = FlagParser(prog=f"openinfer {command}", description=description)
    parser.add_argument(
        "--model",
        metavar="DIR|NAME",
        help="a Hugging Face model folder, a repository of the hub (ORG/NAME: the cache is looked up, then it is "
        "downloaded), or an installed checkpoint: tiny; where --model is not written it is the first argument",
    )
    parser.add_argument(
        "--revision", metavar="REV", help="of a repository: a branch, a tag or a commit (default: main)"
    )
    parser.add_argument("--offline", action="store_true", help="download nothing, as HF_HUB_OFFLINE=1")
    parser.add_argument("--family", metavar="NAME", help="the model family to use when more than one claims the model")
    return parser
