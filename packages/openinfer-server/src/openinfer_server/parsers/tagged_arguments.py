"""`TaggedArguments`: parameters that stand between tags, each by itself, become one JSON object as they come."""

import msgspec

from openinfer_server.parsers.calls import CallParser
from openinfer_server.parsers.script import Script
from openinfer_server.parsers.syntax.markers import Markers
from openinfer_server.parsers.syntax.typed_values import TEXT, as_json

MAX_HELD = 2**20  # characters of a value that are held to see what JSON they are; a longer value is a string


class TaggedArgumentsParser(CallParser):
    """A script with verbs for such parameters."""

    _num_parameters = 0

    def begin_arguments(self) -> None:
        self._num_parameters = 0
        self.arguments("{")

    def end_arguments(self) -> None:
        self.arguments("}")

    def begin_parameter(self, name: str) -> None:
        comma = ", " if self._num_parameters else ""
        self._num_parameters += 1
        self.arguments(f"{comma}{_quote(name)}: ")

    def value(
        self,
        ends: Markers,
        types: frozenset[str],
        *,
        own_lines: bool = False,
        line_ends: frozenset[str] = frozenset(),
    ) -> Script[str | None]:
        """Hands on a value and takes the marker that ends it; returns that, or None if the text ended before.

        A string is handed on as it comes; a value that may be of another type when it is whole. Of a value that was
        cut, there is no closing quote: it must not be taken for a whole one.

        Args:
            ends: what may end it.
            types: JSON types it may have.
            own_lines: whether a newline after the opening tag and before what ends it belongs to the tags.
            line_ends: ends to which a newline before them belongs in any case.
        """
        if own_lines:
            yield from self.literal("\n")
        value = _Value(self, streamed=types == TEXT)
        end = yield from self.text_until(ends, value.write)
        if end is None:
            value.cut()
        else:
            value.close(types, with_newline=not own_lines and end not in line_ends)
        return end


class _Value:
    """Text of one value on its way to JSON."""

    __slots__ = ("_held", "_newline", "_num_held", "_parser", "_streamed")

    def __init__(self, parser: CallParser, *, streamed: bool) -> None:
        self._parser = parser
        self._newline = ""  # at the end of the text so far: it may belong to the tag that comes
        self._held: list[str] = []
        self._num_held = 0
        self._streamed = streamed
        if streamed:
            parser.arguments('"')

    def write(self, text: str) -> None:
        text, self._newline = self._newline + text, ""
        if text.endswith("\n"):
            text, self._newline = text[:-1], "\n"
        self._take(text)

    def close(self, types: frozenset[str], *, with_newline: bool) -> None:
        if with_newline:
            self._take(self._newline)
        self._parser.arguments('"' if self._streamed else as_json("".join(self._held), types))

    def cut(self) -> None:
        self._parser.arguments("".join(self._held))

    def _take(self, text: str) -> None:
        if self._streamed:
            self._parser.arguments(_escape(text))
            return
        self._held.append(text)
        self._num_held += len(text)
        if self._num_held > MAX_HELD:
            self._streamed = True
            self._parser.arguments('"' + _escape("".join(self._held)))
            self._held.clear()


def _quote(text: str) -> str:
    return msgspec.json.encode(text).decode()


def _escape(text: str) -> str:
    return _quote(text)[1:-1]
