"""Kimi-K2's format: special tokens around an id and a JSON object.

    <|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Paris"}
    <|tool_call_end|><|tool_calls_section_end|>

The id is `functions.{name}:{number}` and goes to the client as it is, since the template writes it before the result.
Source: https://huggingface.co/moonshotai/Kimi-K2-Instruct, docs/tool_call_guidance.md.
"""

import re
from collections.abc import Sequence

from openinfer_server.parsers.calls import CallParser
from openinfer_server.parsers.contract import ModelTraits
from openinfer_server.parsers.script import Script
from openinfer_server.parsers.syntax.call_syntax import CallableFunction, CallSyntax, LarkTexts
from openinfer_server.parsers.syntax.markers import Markers

OPENINFER_CONTRACT = 1

SECTION_BEGIN, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL_BEGIN, CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
TURN = "<|im_middle|>"
ARGUMENTS_BEGIN = "<|tool_call_argument_begin|>"
_MARKERS = Markers(SECTION_BEGIN, SECTION_END, CALL_BEGIN)
_IN_SECTION = Markers(SECTION_BEGIN, SECTION_END, CALL_BEGIN, CALL_END, ARGUMENTS_BEGIN)
_ID = re.compile(r"[^<\s]*")
_NOISE = re.compile(r"[^<]*")
_NAME = re.compile(r"(?:functions\.)?([^:]+)(?::\d+)?")


class KimiK2Parser(CallParser):
    """Arguments are handed on as they come. Calls outside a section count, too.

    What else stands in a section is content, without the format's own tokens: words between calls, after an id, and
    after arguments.
    """

    visible_tokens = (SECTION_BEGIN, SECTION_END, CALL_BEGIN, ARGUMENTS_BEGIN, CALL_END)

    @classmethod
    def claims(cls, traits: ModelTraits) -> bool:
        # the template's first revisions write Kimi's turns, but no sections
        return SECTION_BEGIN in traits.template or TURN in traits.template or traits.family == "kimi_k2"

    @classmethod
    def call_syntax(cls, functions: Sequence[CallableFunction], lark: LarkTexts) -> CallSyntax:
        end = lark.text(CALL_END)
        calls = [
            f"{lark.text(f'{CALL_BEGIN}functions.{each.name}:')} /[0-9]{{1,4}}/ "
            f"{lark.text(ARGUMENTS_BEGIN)} {lark.arguments(each)} {end}"
            for each in functions
        ]
        return CallSyntax(
            calls=calls,
            before=lark.text(SECTION_BEGIN),
            after=lark.text(SECTION_END),
            triggers=(SECTION_BEGIN, CALL_BEGIN),
        )

    def run(self) -> Script[None]:
        markers = _MARKERS
        while marker := (yield from self.content_until(markers)):
            if marker != CALL_BEGIN:
                markers = _MARKERS if marker == SECTION_END else _IN_SECTION
                self.content.at_tag()
                continue
            self.begin_tentative(CALL_BEGIN)
            if (yield from self._call()):
                markers = _IN_SECTION
            else:
                self.give_up()

    def _call(self) -> Script[bool]:
        yield from self.spaces()
        call_id = yield from self.run_of(_ID)
        yield from self.spaces()
        noise = yield from self.run_of(_NOISE)
        name = _NAME.fullmatch(call_id)
        if name is None or not (yield from self.literal(ARGUMENTS_BEGIN)):
            return False
        self.commit()
        self.content.write(noise)
        self.begin_call(name.group(1), call_id)
        yield from self.json_arguments(CALL_END)
        yield from self.spaces()
        yield from self.literal(CALL_END)
        self.is_cut(CALL_END)
        self.end_call()
        return True
