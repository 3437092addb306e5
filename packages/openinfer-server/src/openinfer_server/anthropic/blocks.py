"""Blocks of a request's messages, and the turns they stand for."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeAlias

import msgspec

from openinfer_server.anthropic.types import MessageParam
from openinfer_server.http.api_errors import convert_inside, invalid, refused
from openinfer_server.limits.conversation import check_depth
from openinfer_server.openai.types import (
    TEXT_ONLY,
    AssistantTurn,
    FunctionCall,
    SystemTurn,
    ToolCall,
    ToolTurn,
    Turn,
    UserTurn,
    refuse_other_parts,
)
from openinfer_server.request.fields import RequestFields, check_rules
from openinfer_server.request.retention import CacheControl
from openinfer_server.request.rules import ANY, Neutral, Refused, Rule

_NO_TOOLSETS = Refused("tools come one by one here")


class TextBlock(RequestFields, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """Text."""

    text: str
    cache_control: CacheControl | None = None
    citations: list[dict[str, Any]] | None = None

    RULES: ClassVar[Mapping[str, Rule]] = {
        "citations": Neutral(ANY, "they say where text came from; the text is what the model reads"),
    }


class ThinkingBlock(
    RequestFields, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="thinking"
):
    """What the model thought; templates may drop it."""

    thinking: str
    signature: str | None = None

    RULES: ClassVar[Mapping[str, Rule]] = {"signature": Neutral(ANY, "thinking is not signed here")}


class ToolUseBlock(
    RequestFields, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="tool_use"
):
    """A call the model made."""

    id: str
    name: str
    # An object; anything where a stream's events were put together of arguments that are none.
    input: object = None
    cache_control: CacheControl | None = None
    caller: dict[str, Any] | None = None
    toolset_name: object = None

    RULES: ClassVar[Mapping[str, Rule]] = {
        "caller": Neutral(ANY, "the model is the only one who calls"),
        "toolset_name": _NO_TOOLSETS,
    }


class ToolResultBlock(
    RequestFields, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="tool_result"
):
    """What a call returned."""

    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None
    toolset_name: object = None

    RULES: ClassVar[Mapping[str, Rule]] = {
        "is_error": Neutral(ANY, "templates have no place for it; the content says what went wrong"),
        "toolset_name": _NO_TOOLSETS,
    }


Block: TypeAlias = TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock
BLOCK_TYPES = ("text", "thinking", "tool_use", "tool_result")
_BY_ROLE: Mapping[str, tuple[type, ...]] = {
    "user": (TextBlock, ToolResultBlock),
    "assistant": (TextBlock, ThinkingBlock, ToolUseBlock),
    "system": (TextBlock,),
}


@dataclass(frozen=True, slots=True)
class BlockMark:
    """A mark on a block of a turn: the characters of the turn's text that are the block's, none for a call."""

    control: CacheControl
    begin: int = 0
    end: int = 0


class MarkedTurn(NamedTuple):
    """A turn, and the marks on its blocks."""

    turn: Turn
    marks: Sequence[BlockMark] = ()


def turns_of(messages: Sequence[MessageParam]) -> list[MarkedTurn]:
    """The turns that messages stand for; results of tools are turns of their own, before the text next to them.

    Raises:
        ApiError: 400; also for a result of a call that no earlier message has.
    """
    if not messages:
        raise invalid("messages", "messages is empty")
    turns: list[MarkedTurn] = []
    called: set[str] = set()
    for index, message in enumerate(messages):
        for marked in _turns(message, f"messages[{index}]"):
            match marked.turn:
                case AssistantTurn(tool_calls=calls):
                    called.update(call.id for call in calls or ())
                case ToolTurn(tool_call_id=call_id) if call_id not in called:
                    told = f"no tool_use before its result has the tool_use_id {str(call_id)[:100]!r}"
                    raise invalid(f"messages[{index}]", told)
                case _:
                    pass
            turns.append(marked)
    return turns


def system_text(system: str | Sequence[TextBlock]) -> str:
    return system if isinstance(system, str) else "".join(block.text for block in system)


def read_block(given: Mapping[str, Any], where: str) -> Block:
    kind = given.get("type")
    if kind not in BLOCK_TYPES:
        known = ", ".join(BLOCK_TYPES)
        raise refused(f"{where}.type", f"{TEXT_ONLY}, whose blocks are {known}; not {str(kind)[:100]!r}")
    refuse_other_parts(given, where, "content")
    block: Block = convert_inside(given, Block, where)
    check_rules(block, f"{where}.")
    if isinstance(block, ToolUseBlock):
        check_depth(block.input, f"{where}.input")
    return block


def _turns(message: MessageParam, where: str) -> list[MarkedTurn]:
    content = message.content
    if isinstance(content, str):
        return [MarkedTurn(_plain(message.role, content))]
    blocks = [read_block(block, f"{where}.content[{index}]") for index, block in enumerate(content)]
    for index, block in enumerate(blocks):
        if not isinstance(block, _BY_ROLE[message.role]):
            field = f"{where}.content[{index}]"
            raise invalid(field, f"{field} cannot stand in a message of the {message.role}")
    if message.role == "assistant":
        return [_assistant(blocks)]
    results = [_result(block) for block in blocks if isinstance(block, ToolResultBlock)]
    texts = [block for block in blocks if isinstance(block, TextBlock)]
    if results and not texts:
        return results
    text, marks = _joined(texts)
    return [*results, MarkedTurn(_plain(message.role, text), marks)]


def _joined(blocks: Iterable[TextBlock]) -> tuple[str, list[BlockMark]]:
    """Their text as one, and the marks on them."""
    marks: list[BlockMark] = []
    texts: list[str] = []
    end = 0
    for block in blocks:
        begin, end = end, end + len(block.text)
        texts.append(block.text)
        if block.cache_control is not None:
            marks.append(BlockMark(block.cache_control, begin, end))
    return "".join(texts), marks


def _plain(role: str, text: str) -> Turn:
    match role:
        case "user":
            return UserTurn(content=text)
        case "system":
            return SystemTurn(content=text)
        case _:
            return AssistantTurn(content=text)


def _assistant(blocks: Sequence[Block]) -> MarkedTurn:
    text, marks = _joined(block for block in blocks if isinstance(block, TextBlock))
    calls = [block for block in blocks if isinstance(block, ToolUseBlock)]
    turn = AssistantTurn(
        content=text,
        reasoning_content="".join(b.thinking for b in blocks if isinstance(b, ThinkingBlock)) or None,
        tool_calls=[_call(block) for block in calls] or None,
    )
    marks += [BlockMark(call.cache_control) for call in calls if call.cache_control is not None]
    return MarkedTurn(turn, marks)


def _call(block: ToolUseBlock) -> ToolCall:
    arguments = msgspec.json.encode({} if block.input is None else block.input).decode()
    return ToolCall(id=block.id, type="function", function=FunctionCall(name=block.name, arguments=arguments))


def _result(block: ToolResultBlock) -> MarkedTurn:
    content = block.content
    text, marks = (content, []) if isinstance(content, str) else _joined(content or [])
    if block.cache_control is not None:
        marks.append(BlockMark(block.cache_control, 0, len(text)))
    return MarkedTurn(ToolTurn(content=text, tool_call_id=block.tool_use_id), marks)
