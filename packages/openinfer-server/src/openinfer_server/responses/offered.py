"""The functions that a request offers, alone or in namespaces.

A namespace groups functions, as Codex groups those of an MCP server. For the model each is one function with both
names, `NAMESPACE__NAME`; what it calls is told to the client by namespace and name, as the client gave them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from openinfer_server.http.api_errors import convert_inside, invalid, refused
from openinfer_server.request.fields import check_rules
from openinfer_server.responses.types import FUNCTIONS_ONLY, FunctionTool, NamespaceTool
from openinfer_server.tools.dropped import kept_tools
from openinfer_server.tools.types import MAX_TOOLS, FunctionDefinition


class CallName(NamedTuple):
    """What a client calls a function."""

    namespace: str | None
    name: str

    @property
    def for_model(self) -> str:
        return self.name if self.namespace is None else f"{self.namespace}__{self.name}"


@dataclass(frozen=True, slots=True)
class OfferedFunctions:
    """Functions as the model sees them.

    Attributes:
        functions: named for the model, by their places in the request.
        names: what the client calls those in namespaces, by their names for the model.
    """

    functions: Mapping[str, FunctionDefinition]
    names: Mapping[str, CallName]


def read_tools(given: Sequence[Mapping[str, Any]] | None) -> OfferedFunctions:
    """The functions on offer.

    Raises:
        ApiError: 400; there are too many, or one is no function.
    """
    if len(given or ()) > MAX_TOOLS:
        raise invalid("tools", f"{len(given or ())} tools are given; at most {MAX_TOOLS} are possible")
    functions: dict[str, FunctionDefinition] = {}
    names: dict[str, CallName] = {}
    for index, tool in kept_tools(given).items():
        place = f"tools[{index}]"
        if tool.get("type") != "namespace":
            functions[place] = _function(tool, place)
            continue
        namespace = convert_inside(tool, NamespaceTool, place)
        for inner, each in enumerate(namespace.tools):
            function = _function(each, f"{place}.tools[{inner}]")
            called = CallName(namespace.name, function.name)
            names[called.for_model] = called
            functions[f"{place}.tools[{inner}]"] = _inside(namespace, function, called)
    return OfferedFunctions(functions, names)


def _function(tool: Mapping[str, Any], place: str) -> FunctionDefinition:
    kind = tool.get("type")
    if kind != "function":
        raise refused(f"{place}.type", f"{FUNCTIONS_ONLY}, not {str(kind)[:100]!r}")
    function = convert_inside(tool, FunctionTool, place)
    check_rules(function, f"{place}.")
    return FunctionDefinition(
        name=function.name,
        description=function.description,
        parameters=function.parameters,
        strict=function.strict,
    )


def _inside(namespace: NamespaceTool, function: FunctionDefinition, called: CallName) -> FunctionDefinition:
    descriptions = [text for text in (namespace.description, function.description) if text]
    return msgspec.structs.replace(
        function, name=called.for_model, description="\n\n".join(descriptions) if descriptions else None
    )
