"""`CallParser`: what the parsers of tool calls share: numbering, and arguments that are one JSON value."""

from openinfer_server.parsers.contract import ParserContext
from openinfer_server.parsers.deltas import CallArguments, CallEnd, CallStart
from openinfer_server.parsers.markers import Markers
from openinfer_server.parsers.script import Script, ScriptedParser


class CallParser(ScriptedParser):
    """A script that says calls."""

    def __init__(self, context: ParserContext) -> None:
        super().__init__()
        self.context = context
        self._index = -1

    def begin_call(self, name: str, call_id: str | None = None) -> None:
        """A call begins; what was read tentatively was its markup."""
        self.commit()
        self._index += 1
        self.say(CallStart(self._index, call_id or self.context.new_call_id(), name))

    def arguments(self, text: str) -> None:
        """More of the arguments."""
        if text:
            self.say(CallArguments(self._index, text))

    def end_call(self) -> None:
        """The call gets nothing more."""
        self.say(CallEnd(self._index))

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
