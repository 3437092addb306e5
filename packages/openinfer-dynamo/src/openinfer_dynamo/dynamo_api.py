"""What this package takes from Dynamo, by the names that it has there; nothing else here imports it."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from openinfer_core import FailureKind, Refused

_NEWEST_READ = "1.6.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamoApi:
    """Constructors of `dynamo.common.backend`, and an exception of `dynamo.llm.exceptions` for each kind of failure."""

    engine_config: Callable[..., Any]
    llm_registration: Callable[..., Any]
    zmq_source: Callable[..., Any]
    component_snapshot: Callable[..., Any]
    probe: Callable[..., dict[str, Any]]
    """`build_health_check_payload`: a request of one token, with the operator's own in its place if there is one."""
    failure: Mapping[FailureKind, Callable[[str], Exception]]


def load_dynamo() -> DynamoApi:
    """Imports Dynamo; raises `Refused` if it is not installed."""
    engine, publisher = import_dynamo("common.backend.engine"), import_dynamo("common.backend.publisher")
    health_check, errors = import_dynamo("common.backend.health_check"), import_dynamo("llm.exceptions")
    return DynamoApi(
        engine_config=engine.EngineConfig,
        llm_registration=engine.LlmRegistration,
        zmq_source=publisher.ZmqSource,
        component_snapshot=publisher.ComponentSnapshot,
        probe=health_check.build_health_check_payload,
        failure={
            FailureKind.INVALID: errors.InvalidArgument,
            FailureKind.NOT_FOUND: errors.InvalidArgument,
            FailureKind.OVERLOADED: lambda message: errors.HttpError(429, message),
            FailureKind.DEADLINE: errors.ConnectionTimeout,
            FailureKind.INTERNAL: errors.Unknown,
            FailureKind.SHUTDOWN: errors.EngineShutdown,
            FailureKind.UNAVAILABLE: lambda message: errors.HttpError(503, message),
        },
    )


def import_dynamo(module: str) -> Any:
    """A module below `dynamo`; raises `Refused` if it is not installed."""
    try:
        return importlib.import_module(f"dynamo.{module}")
    except ImportError as error:
        raise Refused(
            f"Dynamo is not installed ({error}): the README of openinfer-dynamo says how; ai-dynamo {_NEWEST_READ} is "
            "the newest release that this package was tried with"
        ) from error
