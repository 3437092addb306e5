"""`OutputParser`: one answer's reasoning parser and tool parser, one after the other.

    text ─► ReasoningParser ─► reasoning
                  └─► content ─► ToolParser ─► content, calls

Either may be absent. With both, a call may end the reasoning (`ReasoningCalls`). This is what the endpoints use;
nothing here knows HTTP.
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TypeVar

from openinfer_core.plugins import PLUGIN_ERRORS, place_of
from openinfer_server.parsers.contract import ReasoningParser, ToolParser
from openinfer_server.parsers.deltas import ContentDelta, Delta, ReasoningDelta, check_deltas
from openinfer_server.parsers.reasoning_calls import BeginToken, ReasoningCalls, begin_tokens_of

T = TypeVar("T")


class ParserFault(Exception):
    """A parser raised, or said what is no delta; its own exception is the cause.

    Args:
        kind: `reasoning` or `tool`.
        parser: where it is, for those who read the log.
    """

    def __init__(self, kind: str, parser: type) -> None:
        super().__init__(f"the {kind} parser {place_of(parser)} failed on this answer")
        self.kind = kind


def fault_boundary(kind: str, parser: type, call: Callable[[], T]) -> T:
    try:
        return call()
    except ParserFault:
        raise
    except PLUGIN_ERRORS as error:
        raise ParserFault(kind, parser) from error


class OutputParser:
    """Text of one answer, piece by piece, to deltas.

    Args:
        reasoning: None leaves reasoning in the content.
        tools: None leaves calls in the content.
        another: makes tool parsers as `tools` is one; then calls may end the reasoning.
        offered: names of the functions that such calls may name.

    Every method raises `ParserFault` if a parser raises.
    """

    __slots__ = ("_calls", "_is_told_apart", "_reasoning", "_tools")

    def __init__(
        self,
        reasoning: ReasoningParser | None = None,
        tools: ToolParser | None = None,
        *,
        another: Callable[[], ToolParser] | None = None,
        offered: Collection[str] = (),
    ) -> None:
        # Whether all that comes is the answer: the reasoning parser is not asked again.
        self._is_told_apart = reasoning is None
        self._reasoning = reasoning
        self._tools = tools
        self._calls: ReasoningCalls | None = None
        begin_tokens = begin_tokens_of(None if tools is None else type(tools))
        if reasoning is not None and another is not None and begin_tokens:
            self._calls = ReasoningCalls(
                another,
                begin_tokens,
                offered,
                read=self._read,
                is_reasoning=lambda: not self._is_told_apart and reasoning.reasoning,
                closing_text=reasoning.closing_text,
            )

    @property
    def is_plain(self) -> bool:
        return self._reasoning is None and self._tools is None

    @property
    def reasoning(self) -> bool:
        """Whether what comes next is reasoning; not while it may be a call."""
        if self._is_told_apart or self._reasoning is None or (self._calls is not None and self._calls.is_trying):
            return False
        return self._reasoning.reasoning

    @property
    def closing_text(self) -> str:
        """What ends the reasoning; empty without a reasoning parser."""
        return "" if self._reasoning is None else self._reasoning.closing_text

    def feed(self, text: str, begun: Sequence[BeginToken] = ()) -> list[Delta]:
        """Takes the next piece; `begun` are begin tokens in it, or in text that is still to come."""
        if self._is_told_apart:
            return self._content(text)
        if self._calls is None:
            return self._read(text)
        deltas = fault_boundary("tool", type(self._tools), partial(self._calls.feed, text, begun))
        if self._calls.found is not None:
            self._tools, self._is_told_apart = self._calls.found, True
        return deltas

    def finish(self) -> list[Delta]:
        deltas: list[Delta] = []
        if self._calls is not None and not self._is_told_apart:
            deltas = fault_boundary("tool", type(self._tools), self._calls.finish)
            if self._calls.found is not None:
                return deltas
        if self._reasoning is not None and not self._is_told_apart:
            deltas += self._with_calls(_end("reasoning", type(self._reasoning), self._reasoning.finish))
        return deltas if self._tools is None else deltas + _end("tool", type(self._tools), self._tools.finish)

    def _read(self, text: str) -> list[Delta]:
        """The way through both parsers."""
        if self._is_told_apart or self._reasoning is None:
            return self._content(text)
        try:
            deltas = check_deltas(self._reasoning.feed(text))
            if not self._reasoning.reasoning:
                self._is_told_apart = self._reasoning.done
        except PLUGIN_ERRORS as error:
            raise ParserFault("reasoning", type(self._reasoning)) from error
        if self._tools is None or (len(deltas) == 1 and type(deltas[0]) is ReasoningDelta):
            return deltas
        return self._with_calls(deltas)

    def _content(self, text: str) -> list[Delta]:
        if self._tools is None:
            return [ContentDelta(text)] if text else []
        try:
            return check_deltas(self._tools.feed(text))
        except PLUGIN_ERRORS as error:
            raise ParserFault("tool", type(self._tools)) from error

    def _with_calls(self, deltas: list[Delta]) -> list[Delta]:
        told: list[Delta] = []
        for delta in deltas:
            if isinstance(delta, ContentDelta):
                told += self._content(delta.text)
            else:
                told.append(delta)
        return told


def _end(kind: str, parser: type, finish: Callable[[], list[Delta]]) -> list[Delta]:
    return fault_boundary(kind, parser, lambda: check_deltas(finish()))
