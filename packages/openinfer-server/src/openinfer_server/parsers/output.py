"""`OutputParser`: one answer's reasoning parser and tool parser, one after the other.

    text ─► ReasoningParser ─► reasoning
                  └─► content ─► ToolParser ─► content, calls

Either may be absent. This is what the endpoints use; nothing here knows HTTP.
"""

from collections.abc import Callable
from typing import TypeVar

from openinfer_server.parsers.contract import ReasoningParser, ToolParser
from openinfer_server.parsers.deltas import ContentDelta, Delta, ReasoningDelta

T = TypeVar("T")


class ParserFault(Exception):
    """A parser raised; its own exception is the cause.

    Attributes:
        kind: `reasoning` or `tool`.
    """

    def __init__(self, kind: str) -> None:
        super().__init__(f"the {kind} parser failed on this answer")
        self.kind = kind


def fault_boundary(kind: str, call: Callable[[], T]) -> T:
    try:
        return call()
    except Exception as error:
        raise ParserFault(kind) from error


class OutputParser:
    """Text of one answer, piece by piece, to deltas.

    Args:
        reasoning: None leaves reasoning in the content.
        tools: None leaves calls in the content.

    Every method raises `ParserFault` if a parser raises.
    """

    __slots__ = ("_is_told_apart", "_reasoning", "_tools")

    def __init__(self, reasoning: ReasoningParser | None = None, tools: ToolParser | None = None) -> None:
        # Whether all that comes is the answer: the reasoning parser is not asked again.
        self._is_told_apart = reasoning is None
        self._reasoning = reasoning
        self._tools = tools

    @property
    def is_plain(self) -> bool:
        return self._reasoning is None and self._tools is None

    @property
    def reasoning(self) -> bool:
        return not self._is_told_apart and self._reasoning is not None and self._reasoning.reasoning

    @property
    def closing_text(self) -> str:
        """What ends the reasoning; empty without a reasoning parser."""
        return "" if self._reasoning is None else self._reasoning.closing_text

    def feed(self, text: str) -> list[Delta]:
        if self._is_told_apart or self._reasoning is None:
            return self._content(text)
        try:
            deltas = self._reasoning.feed(text)
            if not self._reasoning.reasoning:
                self._is_told_apart = self._reasoning.done
        except Exception as error:
            raise ParserFault("reasoning") from error
        if self._tools is None or (len(deltas) == 1 and type(deltas[0]) is ReasoningDelta):
            return deltas
        return self._with_calls(deltas)

    def finish(self) -> list[Delta]:
        rest = self._reasoning.finish if self._reasoning is not None and not self._is_told_apart else None
        deltas = [] if rest is None else self._with_calls(fault_boundary("reasoning", rest))
        return deltas if self._tools is None else deltas + fault_boundary("tool", self._tools.finish)

    def _content(self, text: str) -> list[Delta]:
        if self._tools is None:
            return [ContentDelta(text)] if text else []
        try:
            return self._tools.feed(text)
        except Exception as error:
            raise ParserFault("tool") from error

    def _with_calls(self, deltas: list[Delta]) -> list[Delta]:
        told: list[Delta] = []
        for delta in deltas:
            if isinstance(delta, ContentDelta):
                told += self._content(delta.text)
            else:
                told.append(delta)
        return told
