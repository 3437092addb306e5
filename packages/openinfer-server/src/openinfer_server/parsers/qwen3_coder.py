"""Qwen3-Coder's and Qwen3.5's format: tags in the manner of XML, values as plain text.

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>

Source: the chat template of https://huggingface.co/Qwen/Qwen3-Coder-30B-A3B-Instruct.
"""

import re
from collections.abc import Mapping, Sequence
from typing import ClassVar

from openinfer_server.parsers.contract import ModelTraits
from openinfer_server.parsers.script import Script
from openinfer_server.parsers.syntax.call_syntax import CallableFunction, CallSyntax, LarkTexts
from openinfer_server.parsers.syntax.markers import Markers
from openinfer_server.parsers.syntax.tagged_syntax import ParameterTags, parameters
from openinfer_server.parsers.syntax.typed_values import types_of
from openinfer_server.parsers.tagged_arguments import TaggedArgumentsParser

OPENINFER_CONTRACT = 1

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
_MARKERS = Markers(OPEN, FUNCTION)
_VALUE_ENDS = Markers(PARAMETER_END, "\n" + PARAMETER, "\n" + FUNCTION_END)
_NEWLINE = "\n"
_WORD = re.compile(r'[^<>"\s]*')


class Qwen3CoderParser(TaggedArgumentsParser):
    """Strings are handed on as they come, other values when they are whole.

    What the function's schema says decides whether `5` is a number. `</parameter>` may be missing where the next tag
    stands on a line of its own; `<tool_call>` may be missing before a function that is on offer.
    """

    visible_tokens = (OPEN, CLOSE)
    begin_tokens: ClassVar[Mapping[str, str]] = {OPEN: ""}

    @classmethod
    def claims(cls, traits: ModelTraits) -> bool:
        return OPEN in traits.template and FUNCTION in traits.template

    @classmethod
    def call_syntax(cls, functions: Sequence[CallableFunction], lark: LarkTexts) -> CallSyntax:
        end = f"\n{PARAMETER_END}\n"
        free, rules = lark.free_value(end, (PARAMETER_END, "\n" + PARAMETER, "\n" + FUNCTION_END))
        tags = ParameterTags(begin=lambda name, _: f"{PARAMETER}{name}>\n", end=end, free=free)
        close = lark.text(f"{FUNCTION_END}\n{CLOSE}")
        calls = [
            f"{lark.text(f'{OPEN}{_NEWLINE}{FUNCTION}{each.name}>{_NEWLINE}')} {parameters(each, lark, tags)} {close}"
            for each in functions
        ]
        triggers = (OPEN, *(f"{FUNCTION}{each.name}>" for each in functions))
        return CallSyntax(calls=calls, between=lark.text("\n"), triggers=triggers, rules=rules)

    def run(self) -> Script[None]:
        while marker := (yield from self.content_until(_MARKERS)):
            self.begin_tentative(marker)
            name = yield from self._name(marker)
            if name:
                self.begin_call(name)
                yield from self._parameters(name)
            else:
                self.give_up()

    def _name(self, marker: str) -> Script[str]:
        """The function's name; empty if this is no call."""
        if marker == OPEN:
            yield from self.spaces()
            if not (yield from self.literal(FUNCTION)):
                return ""
        name = yield from self.run_of(_WORD)
        if not (yield from self.literal(">")):
            return ""
        return name if marker == OPEN or name in self.context.tools else ""

    def _parameters(self, function: str) -> Script[None]:
        schema = self.context.tools.get(function, {})
        self.begin_arguments()
        while True:
            yield from self.spaces()
            self.begin_tentative("")
            if not (yield from self.literal(PARAMETER)):
                break
            name = yield from self.run_of(_WORD)
            if not name or not (yield from self.literal(">")):
                break
            self.commit()
            self.begin_parameter(name)
            end = yield from self.value(_VALUE_ENDS, types_of(schema, name), own_lines=True)
            if end is not None and end != PARAMETER_END:
                self.unread(end)
        yield from self._close()

    def _close(self) -> Script[None]:
        is_closed = False
        if (yield from self.literal(FUNCTION_END)):
            self.commit()
            self.end_arguments()
            yield from self.spaces()
            is_closed = yield from self.literal(CLOSE)
            self.is_cut(CLOSE)
        elif (yield from self.literal(CLOSE)):
            self.commit()
            self.end_arguments()
            is_closed = True
        elif not self.is_cut(PARAMETER, FUNCTION_END, CLOSE):
            self.end_arguments()
        self.end_call(is_closed=is_closed)
        self.give_up()
