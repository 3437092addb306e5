"""What a client gets."""

from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

UNSET = msgspec.UNSET
Nanoseconds = int | msgspec.UnsetType


class ErrorObject(msgspec.Struct, frozen=True):
    """A whole error response, and the last line of a stream that failed."""

    error: str


class CalledFunction(msgspec.Struct, frozen=True, kw_only=True):
    """What a call calls."""

    index: int
    name: str
    arguments: dict[str, Any]


class CallObject(msgspec.Struct, frozen=True, kw_only=True):
    """A call, which comes whole."""

    id: str
    function: CalledFunction


class AnswerMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The assistant's turn, or in a stream a piece of it."""

    role: Literal["assistant"] = "assistant"
    content: str
    thinking: str | msgspec.UnsetType = UNSET
    tool_calls: list[CallObject] | msgspec.UnsetType = UNSET


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """What answers of both routes have in common; what is only in the last line is absent before."""

    model: str
    created_at: str
    done: bool = False
    done_reason: str | msgspec.UnsetType = UNSET
    total_duration: Nanoseconds = UNSET
    load_duration: Nanoseconds = UNSET
    prompt_eval_count: int | msgspec.UnsetType = UNSET
    prompt_eval_duration: Nanoseconds = UNSET
    eval_count: int | msgspec.UnsetType = UNSET
    eval_duration: Nanoseconds = UNSET


class ChatLine(Line, frozen=True, kw_only=True):
    """Response of `POST /api/chat`, or a line of it."""

    message: AnswerMessage


class GenerateLine(Line, frozen=True, kw_only=True):
    """Response of `POST /api/generate`, or a line of it."""

    response: str
    thinking: str | msgspec.UnsetType = UNSET


class Details(msgspec.Struct, frozen=True, kw_only=True):
    """What kind of model it is; empty where the server does not know."""

    parent_model: str = ""
    format: str = ""
    family: str
    families: list[str]
    parameter_size: str = ""
    quantization_level: str = ""


class ListedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A name the server answers to."""

    name: str
    model: str
    modified_at: str  # when this server started: models have no date of their own here
    size: int  # of the weights in memory, in bytes; 0 where the engine does not say
    digest: str = ""
    details: Details


class Tags(msgspec.Struct, frozen=True, kw_only=True):
    """Response of `GET /api/tags`."""

    models: list[ListedModel]


class RunningModel(msgspec.Struct, frozen=True, kw_only=True):
    """A name the server answers to, whose model is loaded, as all are."""

    name: str
    model: str
    size: int
    digest: str = ""
    details: Details
    expires_at: str
    size_vram: int
    context_length: int


class Running(msgspec.Struct, frozen=True, kw_only=True):
    """Response of `GET /api/ps`."""

    models: list[RunningModel]


class Shown(msgspec.Struct, frozen=True, kw_only=True):
    """Response of `POST /api/show`."""

    license: str = ""
    modelfile: str = ""
    parameters: str
    template: str
    details: Details
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class ApiVersion(msgspec.Struct, frozen=True, kw_only=True):
    """Response of `GET /api/version`."""

    version: str


def timestamp(moment: datetime) -> str:
    """As Go writes one in UTC."""
    return f"{moment.astimezone(UTC):%Y-%m-%dT%H:%M:%S.%f}Z"


def now() -> str:
    return timestamp(datetime.now(UTC))
