"""DeepSeek V3's and R1's format, and that of V3.1: special tokens around a name and a JSON object.

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
    ```json
    {"city": "Paris"}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜>…

Source: the chat templates of https://huggingface.co/deepseek-ai/DeepSeek-V3-0324 and DeepSeek-V3.1.
"""

import re
from collections.abc import Mapping, Sequence
from typing import ClassVar

from openinfer_server.parsers.calls import CallParser
from openinfer_server.parsers.contract import ModelTraits
from openinfer_server.parsers.script import Script
from openinfer_server.parsers.syntax.call_syntax import CallableFunction, CallSyntax, LarkTexts
from openinfer_server.parsers.syntax.markers import Markers

OPENINFER_CONTRACT = 1

SECTION_BEGIN, SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
_FENCE = "```"
_MARKERS = Markers(SECTION_BEGIN, SECTION_END, CALL_BEGIN)
_NAME = re.compile(r"[^<\s`{]*")


class DeepSeekV3Parser(CallParser):
    """Arguments are handed on as they come."""

    visible_tokens = (SECTION_BEGIN, SECTION_END, CALL_BEGIN, SEPARATOR, CALL_END)
    begin_tokens: ClassVar[Mapping[str, str]] = {SECTION_BEGIN: "", CALL_BEGIN: ""}

    @classmethod
    def claims(cls, traits: ModelTraits) -> bool:
        return SECTION_BEGIN in traits.template

    @classmethod
    def call_syntax(cls, functions: Sequence[CallableFunction], lark: LarkTexts) -> CallSyntax:
        end = lark.text(CALL_END)
        calls = [f"{lark.text(CALL_BEGIN + each.name + SEPARATOR)} {lark.arguments(each)} {end}" for each in functions]
        return CallSyntax(
            calls=calls,
            before=lark.text(SECTION_BEGIN),
            after=lark.text(SECTION_END),
            triggers=(SECTION_BEGIN, CALL_BEGIN),
        )

    def run(self) -> Script[None]:
        while marker := (yield from self.content_until(_MARKERS)):
            if marker != CALL_BEGIN:
                self.content.at_tag()
                continue
            self.begin_tentative(CALL_BEGIN)
            name = yield from self._name()
            if not name:
                self.give_up()
                continue
            self.begin_call(name)
            yield from self.json_arguments(CALL_END)
            yield from self._close()

    def _name(self) -> Script[str]:
        """The call's name, from either format; empty if it has none."""
        yield from self.spaces()
        name = yield from self.run_of(_NAME)
        yield from self.spaces()
        if not (yield from self.literal(SEPARATOR)):
            return ""
        yield from self.spaces()
        if name == "function" and (yield from self.peek()) != "{":
            name = yield from self.run_of(_NAME)
            yield from self.spaces()
        if (yield from self.literal(_FENCE)):
            yield from self.literal("json")
        return name

    def _close(self) -> Script[None]:
        yield from self.spaces()
        yield from self.literal(_FENCE)
        yield from self.spaces()
        is_closed = yield from self.literal(CALL_END)
        self.is_cut(CALL_END, _FENCE)
        self.end_call(is_closed=is_closed)
