"""What of a message's fields cannot be honoured, beyond their types."""

from collections.abc import Mapping, Sequence
from typing import Any

from openinfer_server.anthropic.types import (
    FUNCTIONS_ONLY,
    NO_THREADS,
    THREAD_UNSUPPORTED,
    ClientTool,
    Prompting,
    ThinkingEnabled,
)
from openinfer_server.http.api_errors import ApiError, convert_inside, invalid, refused
from openinfer_server.openai.types import check_refused
from openinfer_server.tools.types import MAX_TOOLS


def read_tools(given: Sequence[Mapping[str, Any]] | None) -> list[ClientTool]:
    """The tools on offer.

    Raises:
        ApiError: 400; a tool is malformed, or the server would have to run it.
    """
    if len(given or ()) > MAX_TOOLS:
        raise invalid("tools", f"{len(given or ())} tools are given; at most {MAX_TOOLS} are possible")
    tools: list[ClientTool] = []
    for index, tool in enumerate(given or []):
        kind = tool.get("type")
        if kind not in (None, "custom"):
            raise refused(f"tools[{index}].type", f"{FUNCTIONS_ONLY}, whose type is custom; not {str(kind)[:100]!r}")
        tools.append(convert_inside(tool, ClientTool, f"tools[{index}]"))
        check_refused(tools[-1], f"tools[{index}].")
    return tools


def check_prompting(request: Prompting) -> None:
    """Refuses what cannot be honoured of a prompt's fields.

    Raises:
        ApiError: 400.
    """
    if getattr(request, "thread", None) is not None:  # with the code at which the SDK goes on without a thread
        raise ApiError(400, f"thread is not supported: {NO_THREADS}", param="thread", code=THREAD_UNSUPPORTED)
    check_refused(request)
    if request.output_config is not None:
        check_refused(request.output_config, "output_config.")
    thinking = request.thinking
    if isinstance(thinking, ThinkingEnabled) and thinking.budget_tokens < 1:
        raise invalid("thinking.budget_tokens", "thinking.budget_tokens must be at least 1")
