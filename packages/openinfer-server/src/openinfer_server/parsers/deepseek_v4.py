"""DeepSeek V3.2's and V4's format: tags with a special token in them, each value marked as text or JSON.

    <｜DSML｜tool_calls>
    <｜DSML｜invoke name="get_weather">
    <｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>
    <｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜tool_calls>

V3.2 writes `function_calls` for `tool_calls`. Source: encoding/ of https://huggingface.co/deepseek-ai/DeepSeek-V3.2.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from openinfer_server.parsers.contract import ModelTraits
from openinfer_server.parsers.script import Script
from openinfer_server.parsers.syntax.call_syntax import CallableFunction, CallSyntax, LarkTexts
from openinfer_server.parsers.syntax.markers import Markers
from openinfer_server.parsers.syntax.tagged_syntax import ParameterTags, parameters
from openinfer_server.parsers.syntax.typed_values import ANYTHING, TEXT, types_of
from openinfer_server.parsers.tagged_arguments import TaggedArgumentsParser

OPENINFER_CONTRACT = 1

MARK = "｜DSML｜"
SECTIONS = tuple(f"<{slash}{MARK}{name}>" for name in ("tool_calls", "function_calls") for slash in ("", "/"))
CALL_BEGIN, CALL_END = f'<{MARK}invoke name="', f"</{MARK}invoke>"
PARAMETER, PARAMETER_END = f'<{MARK}parameter name="', f"</{MARK}parameter>"
_MARKERS = Markers(*SECTIONS, CALL_BEGIN)
_VALUE_ENDS = Markers(PARAMETER_END, PARAMETER, CALL_END)
_LINE_ENDS = frozenset({PARAMETER, CALL_END})  # where the parameter's own is missing
_WORD = re.compile(r'[^<>"\r\n]*')


class DeepSeekV4Parser(TaggedArgumentsParser):
    """Text is handed on as it comes, JSON when it is whole; what is marked as JSON and is none becomes text."""

    visible_tokens = (MARK, *SECTIONS)
    begin_tokens: ClassVar[Mapping[str, str]] = {MARK: "<"}

    @classmethod
    def claims(cls, traits: ModelTraits) -> bool:
        # the family counts, too: the model ships no template
        return MARK in traits.template or traits.family == "deepseek_v4"

    @classmethod
    def call_syntax(cls, functions: Sequence[CallableFunction], lark: LarkTexts) -> CallSyntax:
        free, rules = lark.free_value(f"{PARAMETER_END}\n", (PARAMETER_END, PARAMETER, CALL_END))
        tags = ParameterTags(begin=_opening, end=f"{PARAMETER_END}\n", free=free)
        begins = [lark.text(f'{CALL_BEGIN}{each.name}">\n') for each in functions]
        close = lark.text(f"{CALL_END}\n")
        calls = [
            f"{begin} {parameters(each, lark, tags)} {close}" for begin, each in zip(begins, functions, strict=True)
        ]
        before, after = lark.text(f"{SECTIONS[0]}\n"), lark.text(SECTIONS[1])
        return CallSyntax(calls=calls, before=before, after=after, triggers=(*SECTIONS, CALL_BEGIN), rules=rules)

    def run(self) -> Script[None]:
        while marker := (yield from self.content_until(_MARKERS)):
            if marker != CALL_BEGIN:
                self.content.at_tag()
                continue
            self.begin_tentative(CALL_BEGIN)
            name = yield from self.run_of(_WORD)
            if name and (yield from self.literal('">')):
                self.begin_call(name)
                yield from self._parameters(name)
            else:
                self.give_up()

    def _parameters(self, function: str) -> Script[None]:
        schema = self.context.tools.get(function, {})
        self.begin_arguments()
        end: str | None = PARAMETER_END
        while end in {PARAMETER_END, PARAMETER}:
            yield from self.spaces()
            self.begin_tentative("")
            parameter = yield from self._parameter(schema)
            if parameter is None:
                break
            self.commit()
            name, types = parameter
            self.begin_parameter(name)
            end = yield from self.value(_VALUE_ENDS, types, line_ends=_LINE_ENDS)
            if end is not None and end != PARAMETER_END:
                self.unread(end)
        yield from self._close()

    def _parameter(self, schema: Mapping[str, Any]) -> Script[tuple[str, frozenset[str]] | None]:
        """The opening tag: a name, and which types its value may have; the schema says so where the tag does not."""
        if not (yield from self.literal(PARAMETER)):
            return None
        name = yield from self.run_of(_WORD)
        if not name or not (yield from self.literal('"')):
            return None
        if (yield from self.literal(">")):
            return name, types_of(schema, name)
        if not (yield from self.literal(' string="')):
            return None
        for word, types in (("true", TEXT), ("false", ANYTHING)):
            if (yield from self.literal(word + '">')):
                return name, types
        return None

    def _close(self) -> Script[None]:
        """Ends the call; what does not belong to it is content. Arguments of a call that was cut stay open."""
        is_closed = yield from self.literal(CALL_END)
        if is_closed:
            self.commit()
        if is_closed or not self.is_cut(PARAMETER, CALL_END):
            self.end_arguments()
        self.end_call(is_closed=is_closed)
        self.give_up()


def _opening(name: str, is_text: bool) -> str:  # noqa: FBT001 - `ParameterTags.begin` passes no keywords
    return f'{PARAMETER}{name}" string="{"true" if is_text else "false"}">'
