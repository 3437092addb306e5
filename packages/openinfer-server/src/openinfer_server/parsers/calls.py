"""`CallParser`: what the parsers of tool calls share: numbering, and arguments that are one JSON value."""

from openinfer_server.parsers.contract import ParserContext
from openinfer_server.parsers.deltas import CallArguments, CallEnd, CallStart
from openinfer_server.parsers.script import Script, ScriptedParser
from openinfer_server.parsers.syntax.markers import Markers
from openinfer_server.parsers.wrapped_arguments import Unwrapped, may_be_wrapped


class CallParser(ScriptedParser):
    """A script that says calls. A parser with `begin_tokens` finds calls in the reasoning, too (`CallsInReasoning`).

    Attributes:
        closed_calls: see there.
    """

    def __init__(self, context: ParserContext) -> None:
        super().__init__()
        self.context = context
        self.closed_calls: list[int] = []
        self._index = -1
        self._unwrapped: Unwrapped | None = None

    def begin_call(self, name: str, call_id: str | None = None) -> None:
        """A call begins; what was read tentatively was its markup."""
        self.commit()
        self._index += 1
        self.say(CallStart(self._index, call_id or self.context.new_call_id(), name))
        schema = self.context.tools.get(name)
        if schema is not None and may_be_wrapped(schema):
            self._unwrapped = Unwrapped(self._say_arguments)

    def arguments(self, text: str) -> None:
        """More of the arguments."""
        if self._unwrapped is None:
            self._say_arguments(text)
        elif self._unwrapped.write(text):
            self._unwrapped = None

    def end_call(self, *, is_closed: bool = False) -> None:
        """The call gets nothing more.

        Args:
            is_closed: whether its closing tag was there, and not only what must come after it.
        """
        if self._unwrapped is not None:
            self._unwrapped.close()
            self._unwrapped = None
        if is_closed:
            self.closed_calls.append(self._index)
        self.say(CallEnd(self._index))

    def _say_arguments(self, text: str) -> None:
        if text:
            self.say(CallArguments(self._index, text))

    def content_until(self, markers: Markers) -> Script[str | None]:
        """Says content up to a marker."""
        return (yield from self.trimmed_until(markers, self.content))

    def json_arguments(self, end: str) -> Script[None]:
        """Hands on the arguments as they stand before `end`; none at all are an empty object."""
        yield from self.spaces()
        first = yield from self.peek()
        if first in {"{", "["}:
            yield from self.json_value(self.arguments, end=end)
        elif first and (yield from self.literal(end)):
            self.unread(end)
            self.arguments("{}")
        elif not self.is_cut(end):
            marker = yield from self.text_until(Markers(end), self.arguments)
            self.unread(marker or "")
