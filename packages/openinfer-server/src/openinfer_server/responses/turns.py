"""The turns that items stand for."""

from collections.abc import Sequence

from openinfer_server.http.api_errors import invalid
from openinfer_server.openai.types import (
    AssistantTurn,
    DeveloperTurn,
    FunctionCall,
    SystemTurn,
    ToolCall,
    ToolTurn,
    Turn,
    UserTurn,
)
from openinfer_server.responses.items import (
    ContentPart,
    FunctionCallItem,
    FunctionOutputItem,
    InputItem,
    MessageItem,
    ReasoningItem,
    Refusal,
)
from openinfer_server.responses.offered import CallName


def turns_of(items: Sequence[InputItem]) -> list[Turn]:
    """The turns that items stand for. Reasoning, text and calls of the model that follow each other are one turn.

    Raises:
        ApiError: 400; what no earlier call asked for cannot be its output.
    """
    turns: list[Turn] = []
    answer = _Answer()
    called: set[str] = set()
    for item in items:
        match item:
            case ReasoningItem():
                answer.reason("".join(part.text for part in item.content or []), turns)
            case FunctionCallItem():
                called.add(item.call_id)
                answer.calls.append(ToolCall(id=item.call_id, type="function", function=_call(item)))
            case MessageItem(role="assistant"):
                answer.say(_text(item.content), turns)
            case MessageItem():
                answer.close(turns)
                turns.append(_turn(item))
            case FunctionOutputItem():
                if item.call_id not in called:
                    raise invalid("input", f"no function call before its output has the call_id {item.call_id[:100]!r}")
                answer.close(turns)
                output = item.output if isinstance(item.output, str) else "".join(part.text for part in item.output)
                turns.append(ToolTurn(content=output, tool_call_id=item.call_id))
    answer.close(turns)
    return turns


class _Answer:
    """The assistant's turn that is being put together."""

    def __init__(self) -> None:
        self.reasoning: list[str] = []
        self.text: list[str] = []
        self.calls: list[ToolCall] = []

    def reason(self, text: str, turns: list[Turn]) -> None:
        # reasoning begins a turn, unless it follows reasoning
        if self.text or self.calls:
            self.close(turns)
        self.reasoning.append(text)

    def say(self, text: str, turns: list[Turn]) -> None:
        # text after calls begins a turn, and so does a second text
        if self.calls or self.text:
            self.close(turns)
        self.text.append(text)

    def close(self, turns: list[Turn]) -> None:
        if self.reasoning or self.text or self.calls:
            turns.append(
                AssistantTurn(
                    content="".join(self.text),
                    reasoning_content="".join(self.reasoning) or None,
                    tool_calls=list(self.calls) or None,
                )
            )
        self.reasoning.clear()
        self.text.clear()
        self.calls.clear()


def _call(item: FunctionCallItem) -> FunctionCall:
    return FunctionCall(name=CallName(item.namespace, item.name).for_model, arguments=item.arguments)


def _turn(item: MessageItem) -> Turn:
    text = _text(item.content)
    match item.role:
        case "system":
            return SystemTurn(content=text)
        case "developer":
            return DeveloperTurn(content=text)
        case _:
            return UserTurn(content=text)


def _text(content: str | list[ContentPart]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.refusal if isinstance(part, Refusal) else part.text for part in content)
