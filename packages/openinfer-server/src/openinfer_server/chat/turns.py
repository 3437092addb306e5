"""Turns of a request as chat templates read them: plain dictionaries in transformers' form."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from openinfer_server.openai.types import (
    AssistantTurn,
    Content,
    DeveloperTurn,
    SystemTurn,
    ToolCall,
    ToolTurn,
    Turn,
    UserTurn,
)

TemplateTurn = Mapping[str, object]
REASONING_NAMES = ("reasoning_content", "reasoning")  # templates read the one or the other


def template_turns(
    turns: Sequence[Turn], *, developer_role: str, text_arguments: bool = False, no_content_beside_calls: bool = False
) -> list[TemplateTurn]:
    """Turns with their text as one string and the arguments of tool calls as objects.

    With `no_content_beside_calls` a turn that calls and says nothing has None for its content, and no empty text.
    With `text_arguments` the template wants those as JSON text instead. Arguments that are no JSON object, of a call
    that was cut off or went wrong, are an object with their text as `arguments`: every template can write that.
    """
    return [
        _assistant_turn(turn, text_arguments=text_arguments, no_content_beside_calls=no_content_beside_calls)
        if isinstance(turn, AssistantTurn)
        else _template_turn(turn, developer_role)
        for turn in turns
    ]


def num_characters(turns: Sequence[TemplateTurn]) -> int:
    return sum(len(value) for turn in turns for value in turn.values() if isinstance(value, str))


def _template_turn(turn: SystemTurn | DeveloperTurn | UserTurn | ToolTurn, developer_role: str) -> TemplateTurn:
    match turn:
        case SystemTurn():
            return _without_none(role="system", content=_text(turn.content), name=turn.name)
        case DeveloperTurn():
            return _without_none(role=developer_role, content=_text(turn.content), name=turn.name)
        case UserTurn():
            return _without_none(role="user", content=_text(turn.content), name=turn.name)
        case ToolTurn():
            return _without_none(
                role="tool", content=_text(turn.content), tool_call_id=turn.tool_call_id, name=turn.name
            )


def _assistant_turn(turn: AssistantTurn, *, text_arguments: bool, no_content_beside_calls: bool) -> TemplateTurn:
    reasoning = turn.reasoning if turn.reasoning_content is None else turn.reasoning_content
    calls = [_tool_call(call, as_text=text_arguments) for call in turn.tool_calls or []]
    content = "" if turn.content is None else _text(turn.content)
    says_nothing = no_content_beside_calls and calls and not content
    others = _without_none(name=turn.name, tool_calls=calls or None, **dict.fromkeys(REASONING_NAMES, reasoning))
    return {"role": "assistant", "content": None if says_nothing else content, **others}


def _tool_call(call: ToolCall, *, as_text: bool) -> dict[str, object]:
    given = call.function.arguments
    arguments = _text_of(given) if as_text else _object_of(given)
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def _text_of(arguments: str | dict[str, Any] | None) -> str:
    if isinstance(arguments, dict):
        return msgspec.json.encode(arguments).decode()
    return arguments or "{}"


def _object_of(arguments: str | dict[str, Any] | None) -> dict[str, Any]:
    if isinstance(arguments, dict):
        return arguments
    try:
        return msgspec.json.decode(arguments or "{}", type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        return {"arguments": arguments}


def _text(content: Content) -> str:
    # parts are one text: nothing is put between them that the client did not write
    return content if isinstance(content, str) else "".join(part.text or "" for part in content)


def _without_none(**fields: object) -> TemplateTurn:
    return {name: value for name, value in fields.items() if value is not None}
