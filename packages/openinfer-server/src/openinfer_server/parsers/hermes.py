"""Qwen3's and Hermes' format: one JSON object per call.

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

Source: the chat templates of Qwen3 and Hermes 2 Pro, https://huggingface.co/Qwen/Qwen3-4B.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from openinfer_server.parsers.calls import CallParser
from openinfer_server.parsers.contract import ModelTraits
from openinfer_server.parsers.script import Script
from openinfer_server.parsers.syntax.call_syntax import CallableFunction, CallSyntax, LarkTexts
from openinfer_server.parsers.syntax.markers import Markers

OPENINFER_CONTRACT = 1

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_OPEN = Markers(OPEN)
MAX_HELD = 2**20  # characters of arguments that are held while the name has not come; more are no call
_TAGS_OF_OTHERS = ("<function=", "<arg_key>")  # Qwen3-Coder's, GLM's
_ARGUMENTS = ("arguments", "parameters")


class HermesParser(CallParser):
    """Arguments are handed on as they come, as the model wrote them.

    Between the tags must stand an object that begins with `name` and `arguments`, in either order; anything else is
    content, tags included. A closing tag or brace that the model forgot is not missed.
    """

    visible_tokens = (OPEN, CLOSE)
    begin_tokens: ClassVar[Mapping[str, str]] = {OPEN: ""}

    @classmethod
    def claims(cls, traits: ModelTraits) -> bool:
        # others write `<tool_call>`, too, with tags of their own in it
        return OPEN in traits.template and not any(tag in traits.template for tag in _TAGS_OF_OTHERS)

    @classmethod
    def call_syntax(cls, functions: Sequence[CallableFunction], lark: LarkTexts) -> CallSyntax:
        end = lark.text(f"}}\n{CLOSE}")
        begins = [f'{OPEN}\n{{"name": "{lark.name_of(each)}", "arguments": ' for each in functions]
        calls = [
            f"{lark.text(begin)} {lark.arguments(each)} {end}" for begin, each in zip(begins, functions, strict=True)
        ]
        return CallSyntax(calls=calls, between=lark.text("\n"), triggers=(OPEN,))

    def run(self) -> Script[None]:
        while (yield from self.content_until(_OPEN)):
            self.begin_tentative(OPEN)
            if (yield from self._call()):
                yield from self._close()
            else:
                self.give_up()

    def _call(self) -> Script[bool]:
        """Reads the object up to the end of its arguments; False if it is none of ours."""
        yield from self.spaces()
        if not (yield from self.literal("{")):
            return False
        key = yield from self._key()
        if key == "name":
            return (yield from self._name_first())
        if key in _ARGUMENTS:
            return (yield from self._arguments_first())
        return False

    def _key(self) -> Script[str | None]:
        yield from self.spaces()
        key = yield from self.json_string()
        yield from self.spaces()
        if not (yield from self.literal(":")):
            return None
        yield from self.spaces()
        return key

    def _name_first(self) -> Script[bool]:
        name = yield from self.json_string()
        yield from self.spaces()
        if not name:
            return False
        if (yield from self.peek()) == "}":
            self.begin_call(name)
            self.arguments("{}")
            return True
        if not (yield from self.literal(",")) or (yield from self._key()) not in _ARGUMENTS:
            return False
        first = yield from self.peek()
        if first in {"{", "["}:
            self.begin_call(name)
            yield from self.json_value(self.arguments, end=CLOSE)
            return True
        value = (yield from self.json_string(MAX_HELD)) if first == '"' else (yield from self._null())
        if value is None:
            return False
        self.begin_call(name)
        self.arguments(value)
        return True

    def _null(self) -> Script[str | None]:
        return "{}" if (yield from self.literal("null")) else None

    def _arguments_first(self) -> Script[bool]:
        held: list[str] = []
        if (yield from self.peek()) != "{" or not (yield from self.json_value(held.append, end=CLOSE, limit=MAX_HELD)):
            return False
        yield from self.spaces()
        if not (yield from self.literal(",")) or (yield from self._key()) != "name":
            return False
        name = yield from self.json_string()
        if not name:
            return False
        self.begin_call(name)
        self.arguments("".join(held))
        return True

    def _close(self) -> Script[None]:
        yield from self.spaces()
        yield from self.literal("}")
        yield from self.spaces()
        is_closed = yield from self.literal(CLOSE)
        self.is_cut(CLOSE)
        self.end_call(is_closed=is_closed)
