"""`openinfer serve`: a model behind an OpenAI-compatible API."""

import argparse
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from openinfer.commands import serve_models
from openinfer.commands.model_arguments import ModelArguments, parse
from openinfer.commands.plan import check_lock, check_writable, resolve
from openinfer.flags import add_flags, read_flags
from openinfer.start_report import StartReport
from openinfer_core.process.early_launch import EarlyLaunch
from openinfer_core.process.logs import FORMAT_VARIABLE, LEVEL_VARIABLE, LogFormat, set_up_logs
from openinfer_core.process.timeline import Timeline
from openinfer_server.options import ServerOptions

logger = logging.getLogger("openinfer")


def run(argv: Sequence[str]) -> int:
    """Loads the model and serves it until SIGTERM or Ctrl-C; returns 1 if the engine died."""
    if serve_models.is_asked(argv):
        return serve_models.run(argv)
    timeline = Timeline()
    arguments = parse(argv, command="serve", description=__doc__ or "", configure=configure)
    options = read_flags(arguments.namespace, ServerOptions, preset={"model_name": [arguments.model_name]})
    _set_up_logs(arguments.namespace)
    if arguments.namespace.locked is not None:
        check_lock(Path(arguments.namespace.locked), resolve(arguments, options))
    if arguments.namespace.start_report is not None:
        check_writable(Path(arguments.namespace.start_report), field="start-report")
    timeline.mark("arguments")
    engine = EarlyLaunch(lambda: arguments.family.launch(arguments.model_dir, arguments.options))
    try:
        return _serve(engine, arguments, options, timeline)
    except BaseException:
        engine.abandon()
        raise


def _serve(engine: EarlyLaunch, arguments: ModelArguments, options: ServerOptions, timeline: Timeline) -> int:
    from openinfer_server import frontend_parts, run_starting  # long to import, while the engine starts

    frontend_parts(arguments.model_dir, arguments.family.name, options)  # a wrong name is told at once
    timeline.mark("imports")

    def announce(url: str) -> None:
        report = StartReport.of(timeline.phases, engine.result().info)
        logger.info("the frontend started in %s", timeline)
        if arguments.namespace.start_report is not None:
            Path(arguments.namespace.start_report).write_bytes(report.encode())
        print(f"openinfer: serving {options.model_name[0]} on {url} ({report.ready_s:.1f} s)", flush=True)

    return run_starting(engine, arguments.model_dir, options, on_ready=announce, timeline=timeline)


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the command itself."""
    parser.add_argument(
        serve_models.FLAG, metavar="FILE", help="several models that take turns, in the place of all other flags"
    )
    parser.add_argument("--start-report", metavar="FILE", help="write the phases of the start to FILE, as JSON")
    parser.add_argument("--locked", metavar="FILE", help="refuse to start unless the composition is the one in FILE")
    parser.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        help="what is logged; info has a line per request (default: info, or OPENINFER_LOG_LEVEL)",
    )
    parser.add_argument(
        "--log-format",
        choices=tuple(LogFormat),
        help="lines of text, or JSON objects (default: text, or OPENINFER_LOG_FORMAT)",
    )
    add_flags(parser, ServerOptions)


def _set_up_logs(namespace: argparse.Namespace) -> None:
    for variable, value in ((LEVEL_VARIABLE, namespace.log_level), (FORMAT_VARIABLE, namespace.log_format)):
        if value is not None:
            os.environ[variable] = value  # the engine's process and the workers read it too
    set_up_logs(os.environ)
