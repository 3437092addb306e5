"""`AvailableTools`: which functions a request puts before the model, checked. The same for every API.

That the model calls at all (`required`, or a function by name), and that its arguments follow their schema (`strict`),
no parser can guarantee: `request/structured.py` has the output constrained while it is sampled.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from openinfer_server.http.api_errors import invalid, refused
from openinfer_server.limits.conversation import check_depth
from openinfer_server.request.fields import check_rules
from openinfer_server.service import Service
from openinfer_server.tools.dropped import kept_tools
from openinfer_server.tools.schemas import EncodedSchemas
from openinfer_server.tools.types import MAX_TOOLS, FunctionDefinition, Tool, ToolChoice

# OpenAI's and Anthropic's, and dots. A name stands unquoted in prompts and tags.
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")


class ToolMode(StrEnum):
    """Whether the model calls."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class AvailableTools:
    """Functions on offer."""

    functions: Sequence[FunctionDefinition] = ()
    parallel: bool = True  # whether one answer may have several calls
    required: bool = False  # whether the answer must be a call
    choice_field: str = "tool_choice"  # what the API calls the field that says so
    # name -> JSON Schema of its parameters, as parsers take them
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])

    @property
    def variables(self) -> Mapping[str, object]:
        """What the chat template gets: nothing, or `tools`."""
        return {"tools": [_for_template(function) for function in self.functions]} if self.functions else {}


@dataclass(frozen=True, slots=True)
class Fields:
    """What an API calls its fields, for messages."""

    tools: str = "tools"
    choice: str = "tool_choice"
    function: str = ".function"  # between a tool and the function's own fields
    schema: str = "parameters"

    def of(self, place: str, name: str) -> str:
        return f"{place}{self.function}.{name}"


@dataclass(frozen=True, slots=True)
class ToolRequest:
    """What a request says about its tools, whatever its API."""

    functions: Mapping[str, FunctionDefinition]  # by their places in the request, as `tools[2]`
    mode: ToolMode = ToolMode.AUTO
    only: Sequence[str] | None = None  # the functions that may be called; None for all
    parallel: bool = True
    fields: Fields = field(default_factory=Fields)


def available_tools(service: Service, requested: ToolRequest) -> AvailableTools:
    """Checks what is wanted.

    Functions that may not be called are not offered: the model does not see them.

    Raises:
        ApiError: 400; the field is named.
    """
    fields = requested.fields
    if len(requested.functions) > MAX_TOOLS:
        raise invalid(fields.tools, f"{len(requested.functions)} tools are given; at most {MAX_TOOLS} are possible")
    names: set[str] = set()
    for place, function in requested.functions.items():
        _check_function(function, place, names, fields)
    unknown = sorted(set(requested.only or ()) - names)
    if unknown:
        raise invalid(fields.choice, f"no tool is named {unknown[0][:64]!r}")
    if requested.mode is ToolMode.REQUIRED and not requested.functions:
        raise invalid(fields.choice, f"{fields.choice} asks for a call and there are no tools")
    if requested.mode is ToolMode.NONE or not requested.functions:
        return AvailableTools(parallel=requested.parallel)
    _check_model(service, fields)
    only = names if requested.only is None else set(requested.only)
    functions = [function for function in requested.functions.values() if function.name in only]
    required = requested.mode is ToolMode.REQUIRED
    if required and not functions:
        raise invalid(fields.choice, f"{fields.choice} asks for a call and allows no tool")
    schemas = EncodedSchemas({function.name: function.parameters or {} for function in functions})
    return AvailableTools(functions, requested.parallel, required, fields.choice, schemas)


def chat_tools(
    service: Service, tools: Sequence[Tool] | None, choice: str | ToolChoice | None, *, parallel: bool | None
) -> AvailableTools:
    """The offer of a chat completion."""
    functions = {(place := f"tools[{index}]"): _function_of(tool, place) for index, tool in kept_tools(tools).items()}
    if not tools and parallel is not None:
        raise invalid("parallel_tool_calls", "parallel_tool_calls is only for requests with tools")
    mode, only = _chat_choice(choice)
    return available_tools(service, ToolRequest(functions, mode, only, parallel is not False))


def _check_function(function: FunctionDefinition, place: str, names: set[str], fields: Fields) -> None:
    if not _NAME.fullmatch(function.name):
        message = "a function's name has 1 to 128 letters, digits, dots, dashes and underscores"
        raise invalid(fields.of(place, "name"), message)
    if function.name in names:
        raise invalid(fields.of(place, "name"), f"two functions are named {function.name!r}")
    check_depth(function.parameters, fields.of(place, fields.schema))
    names.add(function.name)


def _check_model(service: Service, fields: Fields) -> None:
    if service.template is not None and not service.template.knows_tools:
        raise refused(fields.tools, "the model's chat template does not take tools")
    if service.parsers.tools is None:
        why = "no tool parser is chosen for this model; start the server with --tool-parser NAME"
        raise refused(fields.tools, why)


def _function_of(tool: Tool, place: str) -> FunctionDefinition:
    check_rules(tool, f"{place}.")
    if tool.type != "function" or tool.function is None:
        raise invalid(f"{place}.function", "a tool is an object with type function and a function")
    return tool.function


def _chat_choice(choice: str | ToolChoice | None) -> tuple[ToolMode, Sequence[str] | None]:
    if choice is None:
        return ToolMode.AUTO, None
    if isinstance(choice, str):
        return ToolMode(choice), None
    if choice.type == "function" and choice.function is not None:
        return ToolMode.REQUIRED, [choice.function.name]
    if choice.type == "allowed_tools" and choice.allowed_tools is not None:
        allowed = choice.allowed_tools
        return ToolMode(allowed.mode), [tool.function.name for tool in allowed.tools]
    raise invalid("tool_choice", f"a tool_choice of type {choice.type} has an object {choice.type} with its details")


def _for_template(function: FunctionDefinition) -> dict[str, object]:
    """A function as chat templates read it: transformers' form, without what is absent."""
    given: dict[str, object] = {"name": function.name}
    if function.description is not None:
        given["description"] = function.description
    if function.parameters is not None:
        given["parameters"] = function.parameters
    return {"type": "function", "function": given}
