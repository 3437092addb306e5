"""Events of a streamed response, in the order of `builder.py`."""

from typing import TypeAlias

from openinfer_server.http.named_events import NamedEvent
from openinfer_server.responses.objects import (
    OutputItem,
    OutputLogprob,
    ReasoningContent,
    ResponseObject,
    TextContent,
)


class ResponseEvent(NamedEvent, frozen=True, kw_only=True):
    """What all events have."""

    sequence_number: int  # 0, 1, … within one response


class Lifecycle(ResponseEvent, frozen=True, kw_only=True):
    """The response as it is now."""

    response: ResponseObject


class Created(Lifecycle, frozen=True, kw_only=True, tag="response.created"):
    """The first event."""


class Queued(Lifecycle, frozen=True, kw_only=True, tag="response.queued"):
    """It waits for the engine."""


class InProgress(Lifecycle, frozen=True, kw_only=True, tag="response.in_progress"):
    """The engine works on it."""


class Completed(Lifecycle, frozen=True, kw_only=True, tag="response.completed"):
    """The last event of a whole response."""


class Incomplete(Lifecycle, frozen=True, kw_only=True, tag="response.incomplete"):
    """The last event of one that was cut short or cancelled."""


class FailedEvent(Lifecycle, frozen=True, kw_only=True, tag="response.failed"):
    """The last event of one that failed."""


class ItemEvent(ResponseEvent, frozen=True, kw_only=True):
    """An item as it is now."""

    output_index: int
    item: OutputItem


class ItemAdded(ItemEvent, frozen=True, kw_only=True, tag="response.output_item.added"):
    """An item begins."""


class ItemDone(ItemEvent, frozen=True, kw_only=True, tag="response.output_item.done"):
    """An item has ended."""


class PlaceEvent(ResponseEvent, frozen=True, kw_only=True):
    """Where in the output something happens."""

    item_id: str
    output_index: int


class PartEvent(PlaceEvent, frozen=True, kw_only=True):
    """A part of an item as it is now."""

    content_index: int = 0
    part: TextContent | ReasoningContent


class PartAdded(PartEvent, frozen=True, kw_only=True, tag="response.content_part.added"):
    """A part begins."""


class PartDone(PartEvent, frozen=True, kw_only=True, tag="response.content_part.done"):
    """A part has ended."""


class TextDelta(PlaceEvent, frozen=True, kw_only=True, tag="response.output_text.delta"):
    """More text."""

    content_index: int = 0
    delta: str
    logprobs: list[OutputLogprob]


class TextDone(PlaceEvent, frozen=True, kw_only=True, tag="response.output_text.done"):
    """The text is whole."""

    content_index: int = 0
    text: str
    logprobs: list[OutputLogprob]


class ReasoningDeltaEvent(PlaceEvent, frozen=True, kw_only=True, tag="response.reasoning_text.delta"):
    """More reasoning."""

    content_index: int = 0
    delta: str


class ReasoningDone(PlaceEvent, frozen=True, kw_only=True, tag="response.reasoning_text.done"):
    """The reasoning is whole."""

    content_index: int = 0
    text: str


class ArgumentsDelta(PlaceEvent, frozen=True, kw_only=True, tag="response.function_call_arguments.delta"):
    """More of a call's arguments."""

    delta: str


class ArgumentsDone(PlaceEvent, frozen=True, kw_only=True, tag="response.function_call_arguments.done"):
    """A call's arguments are whole."""

    name: str
    arguments: str


Event: TypeAlias = (
    Created
    | Queued
    | InProgress
    | Completed
    | Incomplete
    | FailedEvent
    | ItemAdded
    | ItemDone
    | PartAdded
    | PartDone
    | TextDelta
    | TextDone
    | ReasoningDeltaEvent
    | ReasoningDone
    | ArgumentsDelta
    | ArgumentsDone
)
