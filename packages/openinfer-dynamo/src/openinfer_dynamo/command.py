"""`openinfer dynamo`: a model as a worker of NVIDIA Dynamo, until SIGTERM or Ctrl-C."""

import argparse
import functools
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import msgspec

from openinfer.commands.model_arguments import ModelArguments, parse
from openinfer.flags import add_flags, read_flags
from openinfer_core import InvalidRequest, Refused
from openinfer_core.sampling_defaults import read_sampling_defaults
from openinfer_dynamo.backend import DynamoBackend, WorkerSetup
from openinfer_dynamo.dynamo_api import import_dynamo, load_dynamo
from openinfer_dynamo.options import DynamoOptions

OPENINFER_CONTRACT = 1

_KV_EVENTS = "kv_events"  # the option of an engine that publishes them


def run(argv: Sequence[str]) -> int:
    """Serves until it is told to stop; returns 1 if the engine died.

    Raises:
        OpenInferError: what the user can mend.
    """
    arguments = parse(argv, command="dynamo", description=__doc__ or "", configure=_configure)
    options = read_flags(arguments.namespace, DynamoOptions)
    if sys.platform != "linux":
        raise Refused("a worker of Dynamo needs Linux")
    api = load_dynamo()
    with tempfile.TemporaryDirectory(prefix="openinfer-dynamo-") as folder:  # which others cannot enter
        setup = setup_of(arguments, options, folder=folder)
        backend: Any = engine_type()(setup, options, api, on_death=_end_this_process)

        async def made(_: list[str] | None) -> tuple[Any, Any]:
            return backend, worker_config(setup, options)

        import_dynamo("common.backend.run").run(type(backend), [], made)
    return int(backend.has_died)


def engine_type() -> type[DynamoBackend]:
    """`DynamoBackend` as a class of Dynamo's own, whose defaults answer what is not in it."""
    contract: Any = import_dynamo("common.backend.engine").LLMEngine

    async def from_args(_cls: type, _argv: list[str] | None = None) -> None:
        raise Refused("start this engine as openinfer dynamo MODEL")

    return type("OpenInferEngine", (DynamoBackend, contract), {"from_args": classmethod(from_args)})


def setup_of(arguments: ModelArguments, options: DynamoOptions, *, folder: str) -> WorkerSetup:
    """What the worker serves.

    Args:
        arguments: the command line.
        options: of the worker.
        folder: where sockets may lie.

    Raises:
        InvalidRequest: an option contradicts another.
    """
    family_options = arguments.options
    events = ""
    if options.router_events and getattr(family_options, _KV_EVENTS, None):
        raise InvalidRequest(
            "the worker itself has the engine publish KV events, to Dynamo: leave --kv-events out, or say "
            "--router-events false",
            field=_KV_EVENTS,
        )
    if options.router_events and _KV_EVENTS in family_options.__struct_fields__:
        events = f"ipc://{folder}/kv-events"
        family_options = msgspec.structs.replace(family_options, **{_KV_EVENTS: events})
    return WorkerSetup(
        launch=functools.partial(arguments.family.launch, arguments.model_dir, family_options),
        model_dir=str(arguments.model_dir.resolve()),
        served_model_name=options.served_model_name or arguments.model_name,
        defaults=read_sampling_defaults(arguments.model_dir),
        kv_events=events,
        max_step_tokens=getattr(family_options, "max_step_tokens", None),
    )


def worker_config(setup: WorkerSetup, options: DynamoOptions) -> Any:
    """Dynamo's `WorkerConfig`."""
    modes: Any = import_dynamo("common.constants").DisaggregationMode
    return import_dynamo("common.backend.worker").WorkerConfig(
        namespace=options.namespace,
        component=options.worker_component,
        endpoint=options.endpoint,
        model_name=setup.model_dir,
        served_model_name=setup.served_model_name,
        endpoint_types=options.endpoint_types,
        discovery_backend=str(options.discovery_backend),
        request_plane=str(options.request_plane),
        event_plane=None if options.event_plane is None else str(options.event_plane),
        tool_call_parser=options.tool_call_parser or None,
        reasoning_parser=options.reasoning_parser or None,
        disaggregation_mode=modes(str(options.role)),
    )


def _end_this_process() -> None:
    """As an operator would: Dynamo takes the worker out of its registry, then ends."""
    os.kill(os.getpid(), signal.SIGTERM)


def _configure(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, DynamoOptions)
