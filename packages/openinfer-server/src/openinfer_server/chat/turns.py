"""Turns of a request as chat templates read them: plain dictionaries in transformers' form."""

from collections.abc import Mapping, Sequence

import msgspec

from openinfer_server.http.api_errors import invalid
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


def template_turns(turns: Sequence[Turn], *, developer_role: str, text_arguments: bool = False) -> list[TemplateTurn]:
    """Turns with their text as one string and the arguments of tool calls as objects.

    With `text_arguments` the template wants those as JSON text instead.

    Raises:
        ApiError: 400; a tool call's arguments are not a JSON object.
    """
    return [
        _assistant_turn(turn, f"messages[{index}]", text_arguments=text_arguments)
        if isinstance(turn, AssistantTurn)
        else _template_turn(turn, developer_role)
        for index, turn in enumerate(turns)
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
            return {"role": "tool", "content": _text(turn.content), "tool_call_id": turn.tool_call_id}


def _assistant_turn(turn: AssistantTurn, where: str, *, text_arguments: bool) -> TemplateTurn:
    if turn.content is None and not turn.tool_calls:
        raise invalid(f"{where}.content", f"{where} has neither content nor tool_calls")
    calls = [
        _tool_call(call, f"{where}.tool_calls[{i}]", as_text=text_arguments)
        for i, call in enumerate(turn.tool_calls or [])
    ]
    return _without_none(
        role="assistant",
        content="" if turn.content is None else _text(turn.content),
        name=turn.name,
        reasoning_content=turn.reasoning_content,
        tool_calls=calls or None,
    )


def _tool_call(call: ToolCall, where: str, *, as_text: bool) -> dict[str, object]:
    try:
        arguments = msgspec.json.decode(call.function.arguments, type=dict[str, object])
    except (msgspec.MsgspecError, RecursionError) as error:
        field = f"{where}.function.arguments"
        raise invalid(field, f"{field} is not a JSON object") from error
    function = {"name": call.function.name, "arguments": call.function.arguments if as_text else arguments}
    return {"id": call.id, "type": "function", "function": function}


def _text(content: Content) -> str:
    # parts are one text: nothing is put between them that the client did not write
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _without_none(**fields: object) -> TemplateTurn:
    return {name: value for name, value in fields.items() if value is not None}
