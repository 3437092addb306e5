"""`ReasoningCalls`: calls of a model that did not close its reasoning.

    text ─► the reasoning parser
      │ a call's begin token, by its id
      ▼
    held, and read by a tool parser of its own
      ├ a whole call of a function on offer ─► closing text ─► the call; what follows is for that tool parser
      └ anything else ─► the reasoning parser, as if nothing had been tried

What is said depends on the text and on where begin tokens stand in it, never on the pieces it came in: the first begin
token inside the reasoning from which such a call can be read ends it.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, cast

import msgspec

from openinfer_server.parsers.contract import OutputTextParser, ToolParser
from openinfer_server.parsers.deltas import CallArguments, CallEnd, CallStart, ContentDelta, Delta, check_deltas
from openinfer_server.parsers.syntax.markers import Markers
from openinfer_server.parsers.trimmed import TrimmedText

MAX_ARGUMENTS = 2**20  # characters of arguments of a call inside the reasoning; a longer one is reasoning
# Begin tokens may stand inside what is being tried (a string of its arguments); so many are tried at a time.
MAX_TRIALS = 4

BeginToken: TypeAlias = tuple[int, str]  # where in the answer's text a begin token stands, and which


class CallsInReasoning(Protocol):
    """What a tool parser has in addition if its calls may begin inside the reasoning.

    Attributes:
        begin_tokens: tokens of the vocabulary that begin a call, and what of the call stands right before each.
        closed_calls: indexes of the calls so far that ended with their closing tag.
    """

    begin_tokens: Mapping[str, str]

    @property
    def closed_calls(self) -> Collection[int]: ...


def begin_tokens_of(parser: type[OutputTextParser] | None) -> Mapping[str, str]:
    """A tool parser's `begin_tokens`; empty if its calls do not begin inside the reasoning."""
    return cast("Mapping[str, str]", getattr(parser, "begin_tokens", {}))


@dataclass(slots=True)
class _Trial:
    """A tool parser at a begin token."""

    begin: int  # where in the answer's text the call would begin
    parser: ToolParser
    offered: Collection[str]
    said: list[Delta] = field(default_factory=list[Delta])
    is_call: bool | None = None  # None while it may become one
    _arguments: list[str] = field(default_factory=list[str])
    _num_characters: int = 0

    def take(self, deltas: Sequence[Delta]) -> None:
        self.said += deltas
        for delta in deltas:
            if self.is_call is None:
                self.is_call = self._judge(delta)

    def _judge(self, delta: Delta) -> bool | None:
        """Whether the first thing said is a whole call; None if that is not certain yet."""
        match delta:
            case CallStart(name=name):
                return None if name in self.offered else False
            case CallArguments(text=text):
                self._arguments.append(text)
                self._num_characters += len(text)
                return None if self._num_characters <= MAX_ARGUMENTS else False
            case CallEnd(index=index):
                is_closed = index in cast("CallsInReasoning", self.parser).closed_calls
                return is_closed and is_object("".join(self._arguments))
            case _:
                return False


class ReasoningCalls:
    """Stands before the reasoning parser of one answer.

    Args:
        make: a new tool parser.
        begin_tokens: see `CallsInReasoning`.
        offered: names of the functions on offer.
        read: the way of text without any trial, through both parsers.
        is_reasoning: whether what comes next on that way is reasoning.
        closing_text: what ends the reasoning there.

    Attributes:
        found: what has read a call; then all that follows is for it, and this has done its work.
    """

    def __init__(
        self,
        make: Callable[[], ToolParser],
        begin_tokens: Mapping[str, str],
        offered: Collection[str],
        *,
        read: Callable[[str], list[Delta]],
        is_reasoning: Callable[[], bool],
        closing_text: str,
    ) -> None:
        self.found: WithoutClosing | None = None
        self._make = make
        self._before = begin_tokens
        self._offered = offered
        self._read = read
        self._is_reasoning = is_reasoning
        self._closing_text = closing_text
        beginnings = {text[:length] for text in begin_tokens.values() for length in range(1, len(text) + 1)}
        self._beginnings = tuple(sorted(beginnings, key=len, reverse=True))
        self._coming: deque[BeginToken] = deque()
        self._kept = ""  # the end of the text, which may be what stands before a begin token
        self._offset = 0  # where in the answer's text that begins
        self._trials: list[_Trial] = []
        self._held: list[str] = []  # text since the first trial began

    @property
    def is_trying(self) -> bool:
        return bool(self._trials)

    def feed(self, text: str, begun: Sequence[BeginToken] = ()) -> list[Delta]:
        """Takes the next piece, and begin tokens, each at the latest with its first character."""
        if not (self._trials or self._coming or begun or self._kept or text.endswith(self._beginnings)):
            self._offset += len(text)
            return self._read(text)
        self._coming += begun
        said: list[Delta] = []
        for begins, piece in self._cut(self._kept + text):
            if begins and len(self._trials) < MAX_TRIALS and (self._trials or self._is_reasoning()):
                self._trials.append(_Trial(self._offset, self._make(), self._offered))
            self._offset += len(piece)
            said += self._take(piece)
        if self.found is not None or not (self._trials or self._is_reasoning()):
            said += self._release_kept()
        return said

    def finish(self) -> list[Delta]:
        """The text has ended; what was held is told. What is found is finished, the other parsers are not."""
        said = self._release_kept()
        if self.found is not None:
            return said + self.found.finish()
        for trial in self._trials:
            trial.take(check_deltas(trial.parser.finish()))
            trial.is_call = trial.is_call or False
        said += self._settle()
        return said if self.found is None else said + self.found.flush()

    def _cut(self, text: str) -> Iterator[tuple[bool, str]]:
        """The text up to where it may be what stands before a begin token, cut where calls may begin."""
        self._kept = ""
        base, at, begins = self._offset, 0, False
        while self._coming and self._coming[0][0] - base < len(text):
            place, name = self._coming.popleft()
            before = self._before[name]
            start = place - base - len(before)
            if start < at or not text.startswith(before, start):
                continue
            if start > at:
                yield begins, text[at:start]
            at, begins = start, True
        end = len(text) - next((len(kept) for kept in self._beginnings if text.endswith(kept, at)), 0)
        if begins or end > at:
            yield begins, text[at:end]
        self._kept = text[end:]

    def _take(self, piece: str) -> list[Delta]:
        if self.found is not None:
            return self.found.feed(piece)
        if not self._trials:
            return self._read(piece)
        self._held.append(piece)
        for trial in self._trials:
            trial.take(check_deltas(trial.parser.feed(piece)))
        return self._settle()

    def _release_kept(self) -> list[Delta]:
        kept, self._kept = self._kept, ""
        self._offset += len(kept)
        return self._take(kept)

    def _settle(self) -> list[Delta]:
        """Tells what is certain of the first trial, and of those after it if it was none."""
        said: list[Delta] = []
        while self._trials:
            first = self._trials[0]
            self._trials = [first, *(trial for trial in self._trials[1:] if trial.is_call is not False)]
            if first.is_call is None:
                return said
            if first.is_call:
                self.found = WithoutClosing(first.parser, self._closing_text.strip())
                self._trials.clear()
                return [*said, *self._read(self._closing_text), *self.found.tell(first.said)]
            del self._trials[0]
            said += self._release_first(first)
        return said

    def _release_first(self, first: _Trial) -> list[Delta]:
        """Reads what was held for a trial that was none, up to the next one, which must still be in the reasoning."""
        held = "".join(self._held)
        length = self._trials[0].begin - first.begin if self._trials else len(held)
        said = self._read(held[:length])
        self._held = [held[length:]]
        if self._trials and not self._is_reasoning():
            self._trials.clear()
            said += self._read(held[length:])
        if not self._trials:
            self._held.clear()
        return said


class WithoutClosing:
    """A tool parser after a call that ended the reasoning: the tag that still closes it is left out of its content."""

    def __init__(self, parser: ToolParser, closing: str) -> None:
        self._parser = parser
        self._said: list[Delta] = []
        self._content = TrimmedText(ContentDelta, self._said.append)
        self._closing = Markers(closing)
        self._held = ""  # content that may begin the tag
        self._is_closed = False

    def feed(self, text: str) -> list[Delta]:
        return self.tell(check_deltas(self._parser.feed(text)))

    def finish(self) -> list[Delta]:
        return self.tell(check_deltas(self._parser.finish())) + self.flush()

    def tell(self, deltas: Sequence[Delta]) -> list[Delta]:
        """What is to be told of what the parser said."""
        for delta in deltas:
            if isinstance(delta, ContentDelta):
                self._write(delta.text)
            else:
                self._release()
                self._said.append(delta)
        return self._taken()

    def flush(self) -> list[Delta]:
        """What was held, when the parser has said all."""
        self._release()
        return self._taken()

    def _write(self, text: str) -> None:
        text, self._held = self._held + text, ""
        tag = None if self._is_closed else self._closing.find(text)
        if tag is not None:
            self._is_closed = True
            self._content.write(text[: tag.start()])
            self._content.at_tag()
            text = text[tag.end() :]
        held = 0 if self._is_closed else self._closing.num_held(text)
        self._content.write(text[: len(text) - held])
        self._held = text[len(text) - held :]

    def _release(self) -> None:
        self._content.write(self._held)
        self._content.flush()
        self._held = ""

    def _taken(self) -> list[Delta]:
        said = self._said[:]
        self._said.clear()
        return said


def is_object(text: str) -> bool:
    """Whether arguments are whole: a JSON object."""
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except (msgspec.MsgspecError, RecursionError):
        return False
