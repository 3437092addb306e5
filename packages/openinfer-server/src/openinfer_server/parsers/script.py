"""`ScriptedParser`: parsers written as if the whole text were there.

A subclass writes `run`, a generator that reads the text from its beginning to its end with the verbs below; a verb that
needs more text than there is waits for it (`yield from`). What a verb returns depends on the text alone, never on the
pieces it came in, so a parser made of verbs cannot depend on them either. The buffer holds only what no verb has taken,
which is less than the longest marker beyond the last piece.
"""

import re
from collections.abc import Callable, Generator
from typing import ClassVar, TypeVar

import msgspec

from openinfer_server.parsers.deltas import ContentDelta, Delta
from openinfer_server.parsers.syntax.json_scan import IN_STRING, scan_json
from openinfer_server.parsers.syntax.markers import Markers
from openinfer_server.parsers.trimmed import TrimmedText

T = TypeVar("T")
Script = Generator[None, None, T]  # takes what it can, yields when it needs more text

MAX_WORD = 256  # longest name, key or run of white space inside a tag
UNBOUNDED = 2**62
_SPACES = re.compile(r"[ \t\r\n]*")
_NOT_QUOTED = re.compile(r'[^"\\]*')


class ScriptedParser:
    """Feeds pieces of text to a script.

    Attributes:
        content: where the answer's text goes; the white space next to tags is left out.
        is_read: whether `run` has ended: all that comes is content.
    """

    visible_tokens: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        self.content = TrimmedText(ContentDelta, self.say)
        self._buffer = ""
        self._ended = False
        self._string: Callable[[str], None] | None = None  # takes text inside the JSON string that the script is in
        self._flow: TrimmedText | None = None  # where text goes that the script only looks for markers in
        self._plain = _SPACES  # what such a piece is like that has no marker and no white space at its end
        self.is_read = False
        self._said: list[Delta] = []
        self._taken: list[str] | None = None
        self._script = self._run_to_end()
        next(self._script)

    def run(self) -> Script[None]:
        """Reads the text to its end. Text it leaves is content."""
        raise NotImplementedError

    def feed(self, text: str) -> list[Delta]:
        flow = self._flow
        if flow is not None and not self._buffer and flow.is_clear and self._plain.fullmatch(text):
            return [flow.kind(text)]  # nearly all text is this, and the script would do the same with it
        if not text:
            return []
        if self._string is not None and not self._buffer and IN_STRING.search(text) is None:
            self._string(text)  # the same inside a JSON string
            said, self._said = self._said, []
            return said
        self._buffer += text
        next(self._script)
        said, self._said = self._said, []
        return said

    def finish(self) -> list[Delta]:
        self._ended = True
        next(self._script, None)
        self.content.flush()
        said, self._said = self._said, []
        return said

    def _run_to_end(self) -> Script[None]:
        yield
        yield from self.run()
        self.is_read = True
        while (yield from self.more()):
            self.content.write(self._take(len(self._buffer)))

    def say(self, delta: Delta) -> None:
        """Returns a delta from the `feed` or `finish` that is running."""
        self._said.append(delta)

    # what has been read tentatively

    def begin_tentative(self, text: str) -> None:
        """Text that was read, and what is read from here on, may turn out to be content."""
        self._taken = [text]

    def commit(self) -> None:
        """What was read tentatively was markup: the white space around it belongs to it."""
        self._taken = None
        self.content.at_tag()

    def give_up(self) -> None:
        """What was read tentatively was no markup: it is content."""
        taken, self._taken = self._taken or (), None
        self.content.write("".join(taken))

    # verbs

    def more(self) -> Script[bool]:
        """Waits until there is text that has not been taken; False if it has ended."""
        while not self._buffer:
            if self._ended:
                return False
            yield
        return True

    def peek(self) -> Script[str]:
        """The next character; empty at the end."""
        return self._buffer[0] if (yield from self.more()) else ""

    def literal(self, text: str) -> Script[bool]:
        """Takes exactly this text if it is next."""
        while len(self._buffer) < len(text) and text.startswith(self._buffer) and not self._ended:
            yield
        if not self._buffer.startswith(text):
            return False
        self._take(len(text))
        return True

    def is_cut(self, *tags: str) -> bool:
        """Whether the whole text ends here, or inside one of these tags; drops what there is of it."""
        cut = self._ended and any(tag.startswith(self._buffer) for tag in tags)
        if cut:
            self._buffer = ""
        return cut

    def run_of(self, pattern: "re.Pattern[str]", limit: int = MAX_WORD) -> Script[str]:
        """Takes characters for as long as a class of characters, `[…]*`, goes on, and at most so many."""
        pieces: list[str] = []
        while limit and (yield from self.more()):
            match = pattern.match(self._buffer, 0, limit)
            piece = self._take(match.end() if match else 0)
            limit -= len(piece)
            pieces.append(piece)
            if self._buffer:
                break
        return "".join(pieces)

    def spaces(self) -> Script[str]:
        """Takes white space, at most `MAX_WORD` characters."""
        return (yield from self.run_of(_SPACES))

    def text_until(self, markers: Markers, emit: Callable[[str], None]) -> Script[str | None]:
        """Hands text on up to the first marker and takes that; returns it, or None if the text ended before."""
        while True:
            found = markers.find(self._buffer)
            if found is not None:
                if found.start():
                    emit(self._take(found.start()))
                return self._take(len(found.group()))
            held = markers.num_held(self._buffer)
            if held < len(self._buffer):
                emit(self._take(len(self._buffer) - held))
            if self._ended:
                if held:
                    emit(self._take(held))
                return None
            yield

    def trimmed_until(self, markers: Markers, trimmed: TrimmedText) -> Script[str | None]:
        """`text_until` into text whose white space next to the markers is left out."""
        self._flow, self._plain = trimmed, markers.plain
        found = yield from self.text_until(markers, trimmed.write)
        self._flow = None
        return found

    def unread(self, text: str) -> None:
        """Puts back what was just taken, outside of what is tentative."""
        self._buffer = text + self._buffer

    def json_string(self, limit: int = MAX_WORD) -> Script[str | None]:
        """Takes a JSON string of at most so many characters and returns its value; None if there is none here."""
        if not (yield from self.literal('"')):
            return None
        pieces = ['"']
        while limit > 0:
            piece = yield from self.run_of(_NOT_QUOTED, limit)
            limit -= len(piece) + 2
            pieces.append(piece)
            if (yield from self.literal('"')):
                return _decode_string("".join(pieces) + '"')
            if not (yield from self.literal("\\")) or not (yield from self.more()):
                return None
            pieces.append("\\" + self._take(1))
        return None

    def json_value(self, emit: Callable[[str], None], *, end: str = "", limit: int = UNBOUNDED) -> Script[bool]:
        """Hands an object or array on, up to the bracket that closes it; False if it is not closed.

        It is not checked beyond strings and brackets: models write what is close to JSON, and nothing may be lost.
        A tag `end`, if given, begins with `<`; outside a string it ends the value in any case, and is left there.
        """
        depth, quoted = 0, False
        while True:
            scanned, depth, quoted, closed = scan_json(self._buffer[:limit], end, depth, quoted, final=self._ended)
            limit -= scanned
            if scanned:
                emit(self._take(scanned))
            at_end = end and not quoted and self._buffer.startswith(end)
            if closed or at_end or self._ended or limit <= 0 or len(self._buffer) > limit:
                return closed
            self._string = emit if quoted and limit > UNBOUNDED // 2 else None
            yield
            self._string = None

    def _take(self, length: int) -> str:
        text, self._buffer = self._buffer[:length], self._buffer[length:]
        if self._taken is not None:
            self._taken.append(text)
        return text


def _decode_string(text: str) -> str | None:
    try:
        return msgspec.json.decode(text, type=str)
    except msgspec.MsgspecError:
        return None
