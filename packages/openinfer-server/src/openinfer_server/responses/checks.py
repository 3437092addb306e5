"""What of a response's fields cannot be honoured, beyond their types."""

from collections.abc import Mapping, Sequence
from typing import Any

from openinfer_server.http.api_errors import convert_inside, invalid, refused
from openinfer_server.request.fields import check_refused
from openinfer_server.responses.types import (
    ENCRYPTED,
    FUNCTIONS_ONLY,
    LOGPROBS,
    MAX_METADATA,
    MAX_METADATA_KEY,
    MAX_METADATA_VALUE,
    Conversation,
    FunctionTool,
    ResponseRequest,
)
from openinfer_server.tools.types import MAX_TOOLS


def check_conversation(request: Conversation) -> None:
    """Refuses what cannot be honoured of a prompt's fields."""
    check_refused(request)
    for name in ("reasoning", "text"):
        options = getattr(request, name)
        if options is not None:
            check_refused(options, f"{name}.")


def read_tools(given: Sequence[Mapping[str, Any]] | None) -> list[FunctionTool]:
    """The functions on offer."""
    if len(given or ()) > MAX_TOOLS:
        raise invalid("tools", f"{len(given or ())} tools are given; at most {MAX_TOOLS} are possible")
    tools: list[FunctionTool] = []
    for index, tool in enumerate(given or []):
        kind = tool.get("type")
        if kind != "function":
            raise refused(f"tools[{index}].type", f"{FUNCTIONS_ONLY}, not {str(kind)[:100]!r}")
        tools.append(convert_inside(tool, FunctionTool, f"tools[{index}]"))
        check_refused(tools[-1], f"tools[{index}].")
    return tools


def check_response(request: ResponseRequest) -> None:
    check_conversation(request)
    for name in request.include or []:
        if name not in (LOGPROBS, ENCRYPTED):
            raise refused("include", f"{name[:100]!r} is not among {LOGPROBS} and {ENCRYPTED}; {FUNCTIONS_ONLY}")
    if request.top_logprobs is not None and LOGPROBS not in (request.include or []):
        raise invalid("top_logprobs", f"top_logprobs needs include to have {LOGPROBS}")
    if request.stream_options is not None:
        if not request.stream:
            raise invalid("stream_options", "stream_options is only for stream=true")
        check_obfuscation(request.stream_options.include_obfuscation, "stream_options.include_obfuscation")
    if request.background and request.store is False:
        raise invalid("background", "a background response is stored until it is asked for; leave store out")
    _check_metadata(request.metadata or {})


def check_obfuscation(include: bool | None, field: str) -> None:  # noqa: FBT001 - a field's value
    """Refuses padding."""
    if include:
        raise refused(field, "events are as long as their text")


def _check_metadata(metadata: Mapping[str, str]) -> None:
    if len(metadata) > MAX_METADATA:
        raise invalid("metadata", f"metadata has {len(metadata)} pairs; at most {MAX_METADATA} are possible")
    for key, value in metadata.items():
        if len(key) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE:
            message = f"metadata keys have up to {MAX_METADATA_KEY} characters, values up to {MAX_METADATA_VALUE}"
            raise invalid("metadata", message)
