"""What the frontend adds to a model's composition, before anything is loaded: for `openinfer plan` and its locks."""

from pathlib import Path

from openinfer_core.plugins import find_plugin
from openinfer_core.sampling_defaults import read_sampling_defaults
from openinfer_server.chat.template import template_source
from openinfer_server.http.routes import ENDPOINTS
from openinfer_server.options import ServerOptions
from openinfer_server.parsers import ModelParsers, ModelTraits, choose_parsers


def parsers_for(template: str | None, family: str, options: ServerOptions) -> ModelParsers:
    """The parsers of a model."""
    traits = ModelTraits(family, template or "")
    return choose_parsers(traits, tool_parser=options.tool_parser, reasoning_parser=options.reasoning_parser)


def check_frontend_parts(model_dir: Path, family: str, options: ServerOptions) -> None:
    """Makes the parsers of an answer, and loads the endpoints: what `openinfer plan` asks before it approves them.

    Raises:
        UnusableTemplate, UnusableParser, PluginError: see `frontend_parts`; also for parts that cannot be made.
    """
    parsers = parsers_for(template_source(model_dir), family, options)
    parsers.check()
    for name in options.endpoints:
        find_plugin(ENDPOINTS, name).callable_with(1)


def frontend_parts(model_dir: Path, family: str, options: ServerOptions) -> dict[str, str]:
    """What supplies each part: `tool_parser` -> `hermes (openinfer-server 0.1.0)`.

    Raises:
        UnusableTemplate: the folder's chat template cannot be read.
        InvalidCheckpoint: see `read_sampling_defaults`.
        UnusableParser, PluginError: see `choose_parsers`.
    """
    endpoints = [find_plugin(ENDPOINTS, name) for name in options.endpoints]
    brought = {f"endpoint {plugin.name}": plugin.origin for plugin in endpoints}
    defaults = read_sampling_defaults(model_dir, options.sampling_defaults)
    unknown = f"; not known here: {', '.join(defaults.unknown)}" if defaults.unknown else ""
    return {
        **parsers_for(template_source(model_dir), family, options).parts,
        "sampling_defaults": defaults.described + unknown,
        **brought,
    }


def frontend_distributions(model_dir: Path, family: str, options: ServerOptions) -> set[str]:
    """The distributions that supply the frontend's parts; raises as `frontend_parts` does."""
    parsers = parsers_for(template_source(model_dir), family, options)
    plugins = [chosen.plugin for chosen in (parsers.tools, parsers.reasoning) if chosen is not None]
    plugins += [find_plugin(ENDPOINTS, name) for name in options.endpoints]
    return {"openinfer-server", *(plugin.distribution for plugin in plugins if plugin.distribution is not None)}
