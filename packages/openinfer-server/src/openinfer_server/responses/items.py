"""Input items, and the turns they stand for."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeAlias

from openinfer_server.http.api_errors import convert_inside, refused
from openinfer_server.openai.types import (
    CACHED_ANYWAY,
    PARSED,
    PARSED_ARGUMENTS,
    TEXT_ONLY,
    refuse_other_parts,
)
from openinfer_server.request.fields import RequestFields, check_rules
from openinfer_server.request.rules import ANY, Neutral, Refused, Rule

ItemStatus = Literal["in_progress", "completed", "incomplete"]
_NO_STATE = Neutral(ANY, "it describes the item, not its text")
_BY_CALL_ID = Neutral(ANY, "call_id says which call it was")
_CALLER = Neutral(({"type": "direct"},), "functions are called by the model alone")


class InputText(
    RequestFields, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="input_text"
):
    """Text that the client wrote."""

    text: str
    prompt_cache_breakpoint: object = None

    RULES: ClassVar[Mapping[str, Rule]] = {"prompt_cache_breakpoint": CACHED_ANYWAY}


class OutputText(
    RequestFields, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="output_text"
):
    """Text that the model wrote, handed back."""

    text: str
    annotations: list[object] | None = None
    logprobs: list[object] | None = None
    parsed: object = None

    RULES: ClassVar[Mapping[str, Rule]] = {"annotations": _NO_STATE, "logprobs": _NO_STATE, "parsed": PARSED}


class Refusal(RequestFields, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="refusal"):
    """What another server's model declined to say; for the model it is text."""

    refusal: str


class ReasoningText(
    RequestFields, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="reasoning_text"
):
    """What the model thought."""

    text: str


class SummaryText(
    RequestFields, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="summary_text"
):
    """A summary of what it thought."""

    text: str


ContentPart: TypeAlias = InputText | OutputText | Refusal


class MessageItem(
    RequestFields, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="message"
):
    """A turn's text. The type may be left out."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[ContentPart]
    id: str | None = None
    status: ItemStatus | None = None
    phase: Literal["commentary", "final_answer"] | None = None

    RULES: ClassVar[Mapping[str, Rule]] = {"id": _NO_STATE, "status": _NO_STATE, "phase": _NO_STATE}


class FunctionCallItem(
    RequestFields,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="type",
    tag="function_call",
    rename={"asynchronous": "async"},
):
    """A call the model made."""

    call_id: str
    name: str
    arguments: str | dict[str, Any] | None = None  # as JSON text or as an object
    id: str | None = None
    status: ItemStatus | None = None
    caller: object = None
    created_by: object = None
    namespace: str | None = None
    asynchronous: object = None
    parsed_arguments: object = None

    RULES: ClassVar[Mapping[str, Rule]] = {
        "asynchronous": Neutral((False,), "every call is waited for"),
        "caller": _CALLER,
        "created_by": _NO_STATE,
        "id": _NO_STATE,
        "parsed_arguments": PARSED_ARGUMENTS,
        "status": _NO_STATE,
    }


class FunctionOutputItem(
    RequestFields, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="function_call_output"
):
    """What a call returned."""

    call_id: str
    output: str | list[InputText]
    id: str | None = None
    status: ItemStatus | None = None
    name: str | None = None
    caller: object = None
    created_by: object = None
    namespace: str | None = None

    RULES: ClassVar[Mapping[str, Rule]] = {
        "caller": _CALLER,
        "created_by": _NO_STATE,
        "id": _NO_STATE,
        "name": _BY_CALL_ID,
        "namespace": _BY_CALL_ID,
        "status": _NO_STATE,
    }


class ReasoningItem(
    RequestFields, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="reasoning"
):
    """What the model thought before the next item; templates may drop it."""

    id: str | None = None
    summary: list[SummaryText] | None = None
    content: list[ReasoningText] | None = None
    status: ItemStatus | None = None
    encrypted_content: object = None

    RULES: ClassVar[Mapping[str, Rule]] = {
        "encrypted_content": Refused("only the server that encrypted it can read it"),
        "id": _NO_STATE,
        "status": _NO_STATE,
        "summary": Neutral(ANY, "the template wants the reasoning itself, which is content"),
    }


InputItem: TypeAlias = MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningItem
ITEM_TYPES = ("message", "function_call", "function_call_output", "reasoning")
_REFERENCE = "send the item itself, or continue with previous_response_id"


def read_items(given: str | Sequence[Mapping[str, Any]] | None) -> list[InputItem]:
    """The input as items."""
    if given is None:
        return []
    if isinstance(given, str):
        return [MessageItem(role="user", content=given)]
    return [_read_item(item, f"input[{index}]") for index, item in enumerate(given)]


def _read_item(given: Mapping[str, Any], where: str) -> InputItem:
    kind = given.get("type") or ("message" if "role" in given else "item_reference" if "id" in given else None)
    if kind == "item_reference":
        raise refused(where, _REFERENCE)
    if kind not in ITEM_TYPES:
        known = ", ".join(ITEM_TYPES)
        raise refused(f"{where}.type", f"{TEXT_ONLY}, whose items are {known}; not {str(kind)[:100]!r}")
    refuse_other_parts(given, where, "content", "output")
    item: InputItem = convert_inside({**given, "type": kind}, InputItem, where)
    check_rules(item, f"{where}.")
    return item
