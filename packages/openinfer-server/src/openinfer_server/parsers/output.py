"""`OutputParser`: one answer's reasoning parser and tool parser, one behind the other.

    text ─► ReasoningParser ─► reasoning
                  └─► content ─► ToolParser ─► content, calls

Either may be absent. This is what the endpoints use; nothing here knows HTTP.
"""

from openinfer_server.parsers.contract import ReasoningParser, ToolParser
from openinfer_server.parsers.deltas import ContentDelta, Delta


class OutputParser:
    """Text of one answer, piece by piece, to deltas.

    Args:
        reasoning: None leaves reasoning in the content.
        tools: None leaves calls in the content.
    """

    __slots__ = ("_reasoning", "_tools")

    def __init__(self, reasoning: ReasoningParser | None = None, tools: ToolParser | None = None) -> None:
        self._reasoning = reasoning
        self._tools = tools

    @property
    def reasoning(self) -> bool:
        """Whether what comes next is reasoning."""
        return self._reasoning is not None and self._reasoning.reasoning

    @property
    def closing_text(self) -> str:
        """What ends the reasoning; empty without a reasoning parser."""
        return "" if self._reasoning is None else self._reasoning.closing_text

    def feed(self, text: str) -> list[Delta]:
        """Takes the next piece of text."""
        if self._reasoning is None:
            return self._content(text)
        deltas = self._reasoning.feed(text)
        return deltas if self._tools is None else self._without_calls(deltas)

    def finish(self) -> list[Delta]:
        """The text has ended."""
        deltas = [] if self._reasoning is None else self._without_calls(self._reasoning.finish())
        return deltas if self._tools is None else deltas + self._tools.finish()

    def _content(self, text: str) -> list[Delta]:
        if self._tools is not None:
            return self._tools.feed(text)
        return [ContentDelta(text)] if text else []

    def _without_calls(self, deltas: list[Delta]) -> list[Delta]:
        told: list[Delta] = []
        for delta in deltas:
            if isinstance(delta, ContentDelta):
                told += self._content(delta.text)
            else:
                told.append(delta)
        return told
