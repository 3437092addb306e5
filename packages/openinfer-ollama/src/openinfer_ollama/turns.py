"""Messages of a chat, and the turns they stand for."""

from collections.abc import Sequence

from openinfer_ollama.types import Message
from openinfer_server import (
    AssistantTurn,
    FunctionCall,
    SystemTurn,
    ToolCall,
    ToolTurn,
    UserTurn,
    check_rules,
    invalid,
    refused,
)

Turn = SystemTurn | UserTurn | AssistantTurn | ToolTurn


def turns_of(messages: Sequence[Message]) -> list[Turn]:
    """The turns that messages stand for.

    Calls without an id get one by their place; a result without one is that of the first open call of its name.

    Raises:
        ApiError: 400; its `param` names the field.
    """
    if messages and messages[-1].role == "assistant":
        why = "the last message is the assistant's, which would be continued; this server begins answers anew"
        raise refused("messages", why)
    reader = _Reader()
    return [reader.read(message, f"messages[{index}]") for index, message in enumerate(messages)]


class _Reader:
    """Reads messages in their order, and knows which calls have no result yet."""

    def __init__(self) -> None:
        self._num_calls = 0
        self._open: list[ToolCall] = []

    def read(self, message: Message, where: str) -> Turn:
        check_rules(message, f"{where}.")
        _check_role(message, where)
        content = message.content or ""
        match message.role:
            case "system":
                return SystemTurn(content=content)
            case "user":
                return UserTurn(content=content)
            case "assistant":
                calls = self._calls(message)
                return AssistantTurn(
                    content=content, reasoning_content=message.thinking or None, tool_calls=calls or None
                )
            case "tool":
                return ToolTurn(content=content, name=message.tool_name, tool_call_id=self._answered(message))

    def _calls(self, message: Message) -> list[ToolCall]:
        calls: list[ToolCall] = []
        for call in message.tool_calls or ():
            function = FunctionCall(name=call.function.name, arguments=call.function.arguments or {})
            calls.append(ToolCall(id=call.id or f"call_{self._num_calls}", type="function", function=function))
            self._num_calls += 1
        self._open += calls
        return calls

    def _answered(self, message: Message) -> str:
        given, name = message.tool_call_id, message.tool_name
        fitting = [
            call for call in self._open if (call.id == given if given else name in (None, "", call.function.name))
        ]
        if fitting:
            self._open.remove(fitting[0])
            return fitting[0].id
        return given or "call"


def _check_role(message: Message, where: str) -> None:
    of_others = {
        "assistant": ("tool_call_id", "tool_name"),
        "tool": ("thinking", "tool_calls"),
    }.get(message.role, ("thinking", "tool_calls", "tool_call_id", "tool_name"))
    for name in of_others:
        if getattr(message, name):
            raise invalid(f"{where}.{name}", f"{where}.{name} cannot stand in a message of the {message.role}")
