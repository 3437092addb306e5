"""Reasoning between `<think>` and `</think>`, as Qwen3, DeepSeek and Kimi write it.

A block counts at the beginning of the answer only, where models put it: `<think>` further on is text. If the template
has opened it, which the end of the prompt shows, the answer begins inside. Where the block is closed, closing it once
more, at once, says nothing.
"""

from typing import ClassVar

from openinfer_server.parsers.contract import ModelTraits, ParserContext
from openinfer_server.parsers.deltas import ContentDelta, ReasoningDelta
from openinfer_server.parsers.kimi_k2 import CALL_BEGIN, SECTION_BEGIN, TURN
from openinfer_server.parsers.script import Script, ScriptedParser
from openinfer_server.parsers.syntax.markers import Markers
from openinfer_server.parsers.trimmed import TrimmedText

OPENINFER_CONTRACT = 1

OPEN, CLOSE = "<think>", "</think>"
_DEEPSEEK = "<｜Assistant｜>"


class ThinkParser(ScriptedParser):
    """What all three have in common. White space next to the tags belongs to them."""

    visible_tokens = (OPEN, CLOSE)
    closing_text: ClassVar[str] = f"\n{CLOSE}\n\n"
    tags: ClassVar[tuple[str, str]] = (OPEN, CLOSE)
    ends = Markers(CLOSE)  # what ends the reasoning; what is not the closing tag is read again as text

    def __init__(self, context: ParserContext) -> None:
        super().__init__()
        self.content = TrimmedText(ContentDelta, self.say, before_tags=False)
        prompt = context.prompt.rstrip()
        self.reasoning = prompt.endswith(OPEN)
        self._is_closed = prompt.endswith(CLOSE)

    @property
    def done(self) -> bool:
        return self.is_read and not self.content.skipping

    def run(self) -> Script[None]:
        spaces = yield from self.spaces()
        if (yield from self.literal(OPEN)):
            self.reasoning = True
        elif not self.reasoning:
            yield from self._closed_again(spaces)
            return
        thoughts = TrimmedText(ReasoningDelta, self.say)
        thoughts.at_tag()
        end = yield from self.trimmed_until(self.ends, thoughts)
        self.reasoning = False
        self.content.at_tag()
        if end == CLOSE:
            self._is_closed = True
            yield from self._closed_again((yield from self.spaces()))
        elif end is not None:
            self.unread(end)

    def _closed_again(self, spaces: str) -> Script[None]:
        """Takes closing tags that follow at once, if the reasoning is closed already.

        Args:
            spaces: white space that was taken; content, unless such a tag follows.
        """
        while self._is_closed and (yield from self.literal(CLOSE)):
            self.content.at_tag()
            spaces = yield from self.spaces()
        self.content.write(spaces)


class Qwen3Thinking(ThinkParser):
    """Qwen3, Qwen3.5 and other models that write `<think>`."""

    @classmethod
    def claims(cls, traits: ModelTraits) -> bool:
        return CLOSE in traits.template and not any(name in traits.template for name in (_DEEPSEEK, TURN))


class DeepSeekThinking(ThinkParser):
    """R1, V3.1 to V4; the template opens the block, or closes it at once where no reasoning is wanted."""

    closing_text = CLOSE

    @classmethod
    def claims(cls, traits: ModelTraits) -> bool:
        # the family counts, too: V4 ships no template
        return (CLOSE in traits.template and _DEEPSEEK in traits.template) or traits.family == "deepseek_v4"


class KimiThinking(ThinkParser):
    """Kimi-K2-Thinking, which may begin its calls without closing the block."""

    visible_tokens = (OPEN, CLOSE, SECTION_BEGIN, CALL_BEGIN)
    closing_text = CLOSE
    ends = Markers(CLOSE, SECTION_BEGIN, CALL_BEGIN)

    @classmethod
    def claims(cls, traits: ModelTraits) -> bool:
        return CLOSE in traits.template and TURN in traits.template
