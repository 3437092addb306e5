"""The arguments that every command which loads a model shares: `--model`, `--family` and the family's own options."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

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
    argv: Sequence[str], *, command: str, description: str, configure: Callable[[argparse.ArgumentParser], None]
) -> ModelArguments:
    """Finds the model first, since its family decides which flags there are; then parses everything strictly.

    Raises:
        InvalidRequest: a flag's value is wrong.
        UnclaimedModel, InvalidCheckpoint, PluginError: see `find_family`.
    """
    first = _parser(command, description, add_help=False)
    chosen, _ = first.parse_known_args(argv)
    if chosen.model is None:
        full = _parser(command, description, add_help=True)
        configure(full)
        full.epilog = "With --model, --help also lists the options of the family that serves it."
        full.parse_args(argv)
        raise InvalidRequest("--model is missing: a Hugging Face model folder, or tiny", field="model")
    model_dir = find_model_dir(chosen.model)
    family, plugin = find_family(model_dir, chosen.family)
    parser = _parser(command, description, add_help=True)
    configure(parser)
    add_flags(parser, family.options_type)
    namespace = parser.parse_args(argv)
    return ModelArguments(
        model_name=name_of(chosen.model),
        model_dir=model_dir,
        family=family,
        plugin=plugin,
        options=read_flags(namespace, family.options_type),
        namespace=namespace,
    )


def _parser(command: str, description: str, *, add_help: bool) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"openinfer {command}", description=description, add_help=add_help, allow_abbrev=False
    )
    parser.add_argument(
        "--model", metavar="DIR|NAME", help="a Hugging Face model folder, or an installed checkpoint: tiny"
    )
    parser.add_argument("--family", metavar="NAME", help="the model family to use when more than one claims the model")
    return parser
