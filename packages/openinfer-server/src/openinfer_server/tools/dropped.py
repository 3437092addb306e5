"""Tools that are dropped with notice: clients offer them with every request, and answers are good without them.

A response says so in the header `openinfer-dropped`, no object in it shows them, `openinfer_dropped_fields_total`
counts them, and `--strict true` refuses them. What `tool_choice` names is refused, not dropped.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

from openinfer_server.http.api_errors import refused
from openinfer_server.http.request import HttpRequest
from openinfer_server.service import Service
from openinfer_server.tools.types import DROPPED_TOOLS, Tool

HEADER = b"openinfer-dropped"
T = TypeVar("T", Tool, Mapping[str, Any])


def kept_tools(tools: "Sequence[T] | None") -> "dict[int, T]":
    """The tools that are not dropped, by their places in the request."""
    return {place: tool for place, tool in enumerate(tools or ()) if _type_of(tool) not in DROPPED_TOOLS}


def note_dropped_tools(service: Service, http_request: HttpRequest, tools: "Sequence[T] | None") -> None:
    """Says in the response which tools are dropped, and counts them.

    Raises:
        ApiError: 400; there are some, and the server is strict.
    """
    kept = kept_tools(tools)
    dropped = {place: str(_type_of(tool)) for place, tool in enumerate(tools or ()) if place not in kept}
    if not dropped:
        return
    if service.options.strict:
        place, kind = next(iter(dropped.items()))
        raise refused(f"tools[{place}].type", f"no tool {kind} runs here, and this server is strict")
    told = ", ".join(f"tools[{place}].type={kind}" for place, kind in dropped.items())
    http_request.response_headers += ((HEADER, told.encode()),)
    service.metrics.dropped_tools.update(dropped.values())


def _type_of(tool: "Tool | Mapping[str, Any]") -> object:
    return tool.type if isinstance(tool, Tool) else cast("Mapping[str, object]", tool).get("type")
