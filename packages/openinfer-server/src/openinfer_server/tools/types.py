"""Tools as requests name them, in OpenAI's shape."""

from collections.abc import Mapping
from typing import Any, ClassVar, Final, Literal, get_args

import msgspec

from openinfer_server.request.fields import RequestFields
from openinfer_server.request.rules import Refused, Rule

MAX_TOOLS = 128  # OpenAI's bound
DroppedTool = Literal[
    "web_search",
    "web_search_2025_08_26",
    "web_search_20250305",
    "web_search_20260209",
    "web_search_20260318",
    "web_search_preview",
    "web_search_preview_2025_03_11",
]
DROPPED_TOOLS: Final[frozenset[str]] = frozenset(get_args(DroppedTool))
"""Types of tools that are dropped with notice (`tools/dropped.py`); the list is closed on purpose."""
DROPPED_TOOL_SCHEMA: Final[Mapping[str, Any]] = {
    "type": "object",
    "description": "Dropped with notice, in the header openinfer-dropped.",
    "properties": {"type": {"enum": sorted(DROPPED_TOOLS)}},
    "required": ["type"],
}
_FUNCTIONS_ONLY = Refused("the only tools are functions")


class FunctionDefinition(RequestFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A function on offer."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None  # JSON Schema of its arguments; absent for none
    strict: bool | None = None


class Tool(RequestFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Something the model may call."""

    type: Literal["function", "custom"] | DroppedTool
    function: FunctionDefinition | None = None
    custom: object = None

    RULES: ClassVar[Mapping[str, Rule]] = {"custom": _FUNCTIONS_ONLY}


class FunctionName(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A function that is on offer."""

    name: str


class ToolReference(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tool that is on offer."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Some of the tools."""

    mode: Literal["auto", "required"]
    tools: list[ToolReference]


class ToolChoice(RequestFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which tools the model may or must call."""

    type: Literal["function", "allowed_tools", "custom"]
    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None
    custom: object = None

    RULES: ClassVar[Mapping[str, Rule]] = {"custom": _FUNCTIONS_ONLY}
