"""`MarkedText`: a text that knows of each of its characters where it comes from.

A chat template's rendering is one text, and its tokens have names that any client can type. What may become a control
token is told by origin: each character carries one, through whatever a template does with texts. An operation that is
not here gives a plain `str`, which counts as the client's; where that would hide that the template wrote it, the
sandbox (`chat/sandbox.py`) says that the origin is lost.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import IntEnum
from typing import Any, Self, SupportsIndex, cast

from markupsafe import Markup


class Origin(IntEnum):
    """Where a character comes from."""

    CLIENT = 0
    """A request: contents, names, tools, arguments, documents, variables; and numbers."""
    TEMPLATE = 1
    """The template's own text, or a token that the model folder names; roles, which the server writes."""
    ASSISTANT = 2
    """A turn of the assistant, which may hold what a model writes: reasoning and calls with their marks."""
    LOST = 3
    """An operation that mixes its inputs beyond telling."""


FLAGS = (0x10, 0x20, 0x40, 0x80)
"""Bits next to a character's origin, which a rendering carries along; they say nothing of where it comes from."""
_ORIGIN_BITS = 0x0F
_WITHOUT_FLAGS = bytes(byte & _ORIGIN_BITS for byte in range(256))
_CLIENTS = bytes(byte for byte in range(256) if byte & _ORIGIN_BITS == Origin.CLIENT)
_SAME = re.compile(rb"(.)\1*+", re.DOTALL)
_RUN = re.compile(b"|".join(rb"\x%02x+" % origin for origin in Origin))
_PIECE = 2**14  # characters of which runs are looked for at a time
_CONVERSION = re.compile(r"%(?:\((\w+)\))?(.)", re.DOTALL)


class MarkedText(str):
    """A `str`, equal to it and hashed like it, that carries an origin per character.

    Attributes:
        origins: one byte per character, an `Origin` each.
    """

    __slots__ = ("_plain", "origins")
    origins: bytes
    _plain: str | None

    def __new__(cls, text: str, origins: bytes | None = None) -> Self:
        made = str.__new__(cls, text)
        made.origins = bytes(len(made)) if origins is None else origins
        made._plain = text if type(text) is str else None  # noqa: SLF001 - of its own class
        return made

    @classmethod
    def of(cls, text: str, origin: Origin) -> "MarkedText":
        """A text all of whose characters have one origin."""
        return cls(text, bytes((origin,)) * len(text))

    @property
    def plain(self) -> str:
        """The text as a `str` alone. Each call of `str.__str__` would copy it: a rendered chat is asked seven times."""
        if self._plain is None:
            self._plain = str.__str__(self)
        return self._plain

    @property
    def is_marked(self) -> bool:
        """Whether there is anything that a client did not write."""
        return bool(self.origins.strip(_CLIENTS))

    def of_origin(self, origin: Origin) -> "MarkedText":
        """The text with another origin; flags stay."""
        return MarkedText(
            self.plain, self.origins.translate(bytes(byte & ~_ORIGIN_BITS | origin for byte in range(256)))
        )

    def flagged(self, begin: int, end: int, flag: int) -> "MarkedText":
        """The text with one of `FLAGS` at the characters between two places."""
        table = bytes(byte | flag for byte in range(256))
        origins = self.origins
        return MarkedText(self.plain, b"".join((origins[:begin], origins[begin:end].translate(table), origins[end:])))

    def flagged_range(self, flag: int) -> tuple[int, int] | None:
        """Where the first character with a flag begins and the last one ends; None if none has it."""
        found = self.origins.translate(bytes(bool(byte & flag) for byte in range(256)))
        first = found.find(1)
        return None if first < 0 else (first, found.rfind(1) + 1)

    def without_flags(self) -> "MarkedText":
        return MarkedText(self.plain, self.origins.translate(_WITHOUT_FLAGS))

    def runs(self, first: int = 0) -> Iterator[tuple[int, int, Origin]]:
        """Begin and end of each stretch of one origin, from a place on."""
        # Piece by piece, since most who ask need the first runs alone, or those near the end.
        origins, begin = self.origins, first
        before: tuple[int, int, Origin] | None = None  # the run that the next piece may go on with
        while begin < len(origins):
            piece = origins[begin : begin + _PIECE].translate(_WITHOUT_FLAGS)
            for run in _RUN.finditer(piece):
                origin = Origin(piece[run.start()])
                if before is None or before[2] is not origin:
                    if before is not None:
                        yield before
                    before = (begin + run.start(), begin + run.end(), origin)
                else:
                    before = (before[0], begin + run.end(), origin)
            begin += len(piece)
        if before is not None:
            yield before

    def stretches(self) -> "Iterator[MarkedText]":
        """The parts of the text that have one origin, and the same flags, each."""
        for run in _SAME.finditer(self.origins):
            yield self[run.start() : run.end()]

    def __str__(self) -> str:
        return self  # jinja2 passes every output through `str`

    def __add__(self, other: str) -> "MarkedText":
        if not isinstance(other, str) or isinstance(other, Markup):  # pyright: ignore[reportUnnecessaryIsInstance]
            return NotImplemented  # `Markup` escapes what it is added to
        return joined((self, other))

    def __radd__(self, other: str) -> "MarkedText":
        return joined((other, self))

    def __mul__(self, times: SupportsIndex) -> "MarkedText":
        return MarkedText(str.__mul__(self, times), self.origins * times)

    def __rmul__(self, times: SupportsIndex) -> "MarkedText":
        return self * times

    def __mod__(self, values: Any) -> str:
        return percent_formatted(self, values)

    def __getitem__(self, key: SupportsIndex | slice) -> "MarkedText":
        text = str.__getitem__(self, key)
        if isinstance(key, slice):
            return MarkedText(text, self.origins[key])
        return MarkedText(text, bytes((self.origins[key],)))

    def __iter__(self) -> "Iterator[MarkedText]":  # pyright: ignore[reportIncompatibleMethodOverride]
        return (self[place] for place in range(len(self)))

    def strip(self, chars: str | None = None) -> "MarkedText":
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None) -> "MarkedText":
        return self[len(self) - len(str.lstrip(self, chars)) :]

    def rstrip(self, chars: str | None = None) -> "MarkedText":
        return self[: len(str.rstrip(self, chars))]

    def removeprefix(self, prefix: str, /) -> "MarkedText":
        return self[len(prefix) :] if prefix and self.startswith(prefix) else self

    def removesuffix(self, suffix: str, /) -> "MarkedText":
        return self[: -len(suffix)] if suffix and self.endswith(suffix) else self

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> "list[MarkedText]":  # type: ignore[override]
        return self._found(str.split(self, sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> "list[MarkedText]":  # type: ignore[override]
        return self._found(str.rsplit(self, sep, maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> "list[MarkedText]":  # type: ignore[override]  # noqa: FBT001, FBT002
        begins = itertools.accumulate(map(len, str.splitlines(self, keepends=True)), initial=0)
        lines = str.splitlines(self, keepends=keepends)
        return [self[begin : begin + len(line)] for begin, line in zip(begins, lines, strict=False)]

    def partition(self, sep: str, /) -> "tuple[MarkedText, MarkedText, MarkedText]":  # type: ignore[override]
        before, found, _ = str.partition(self, sep)
        return self._in_three(len(before), len(before) + len(found))

    def rpartition(self, sep: str, /) -> "tuple[MarkedText, MarkedText, MarkedText]":  # type: ignore[override]
        before, found, _ = str.rpartition(self, sep)
        return self._in_three(len(before), len(before) + len(found))

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> "MarkedText":  # type: ignore[override]
        if not old:
            return lost(MarkedText(str.replace(self, old, new, count)), self, new)
        return joined((new,)).join(self.split(old, count))

    def join(self, iterable: Iterable[str], /) -> "MarkedText":
        parts = list(iterable)
        return MarkedText(str.join(self, parts), self.origins.join(map(origins_of, parts)))

    def upper(self) -> "MarkedText":
        return self._in_other_case(str.upper(self))

    def lower(self) -> "MarkedText":
        return self._in_other_case(str.lower(self))

    def casefold(self) -> "MarkedText":
        return self._in_other_case(str.casefold(self))

    def swapcase(self) -> "MarkedText":
        return self._in_other_case(str.swapcase(self))

    def title(self) -> "MarkedText":
        return self._in_other_case(str.title(self))

    def capitalize(self) -> "MarkedText":
        return self._in_other_case(str.capitalize(self))

    def _found(self, pieces: list[str], sep: str | None) -> "list[MarkedText]":
        cut: list[MarkedText] = []
        end = 0
        for piece in pieces:
            # between words is white space alone, and no word begins with it but the first of `rsplit`
            begin = str.index(self, piece, end) if sep is None else end + (len(sep) if cut else 0)
            end = begin + len(piece)
            cut.append(self[begin:end])
        return cut

    def _in_three(self, begin: int, end: int) -> "tuple[MarkedText, MarkedText, MarkedText]":
        return self[:begin], self[begin:end], self[end:]

    def _in_other_case(self, text: str) -> "MarkedText":
        # a character becomes one character or more, never fewer, so that equal lengths are equal places
        if len(text) == len(self):
            return MarkedText(text, self.origins)
        origins = self.origins.translate(_WITHOUT_FLAGS)
        if len(set(origins)) <= 1:
            return MarkedText(text, origins[:1] * len(text))
        return lost(MarkedText(text), self)


CARRIED = frozenset(
    (
        *("strip", "lstrip", "rstrip", "removeprefix", "removesuffix", "split", "rsplit", "splitlines", "partition"),
        *("rpartition", "replace", "join", "upper", "lower", "casefold", "swapcase", "title", "capitalize"),
    )
)
"""Methods of texts that carry origins."""


class LostMarkup(Markup):
    """What jinja2's escaping filters made of a text with marks; it is `Markup` to whatever takes it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"Markup({str.__repr__(self)})"  # a template that writes a list writes this

    def __iter__(self) -> Iterator[MarkedText]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return (MarkedText.of(character, Origin.LOST) for character in str(self))


def origins_of(text: str) -> bytes:
    """One byte per character of any text."""
    if type(text) is str:  # as most are
        return bytes(len(text))
    if isinstance(text, MarkedText):
        return text.origins
    return bytes((Origin.LOST if isinstance(text, LostMarkup) else Origin.CLIENT,)) * len(text)


def joined(parts: Iterable[str]) -> MarkedText:
    """Texts one after the other."""
    several = list(parts)
    return MarkedText("".join(several), b"".join(map(origins_of, several)))


def holds_marks(value: object) -> bool:
    """Whether a value is, or has in it, text that no client wrote."""
    match value:
        case MarkedText():
            return value.is_marked
        case str():
            return isinstance(value, LostMarkup)
        case Mapping():
            items = cast("Mapping[object, object]", value).items()
            return any(holds_marks(key) or holds_marks(item) for key, item in items)
        case list() | tuple() | set() | frozenset():
            return any(map(holds_marks, cast("Iterable[object]", value)))
        case _:
            return False


def lost(result: Any, *sources: object) -> Any:
    """A result whose characters' origins cannot be told; unchanged if it is no text, or nothing of it had marks."""
    if not isinstance(result, str) or not any(map(holds_marks, sources)):
        return result
    return LostMarkup(result) if isinstance(result, Markup) else MarkedText.of(result, Origin.LOST)


def text_of(value: object) -> str:
    """`str(value)` with origins, as jinja2 writes a value."""
    if type(value) is MarkedText or type(value) is str:  # as most are
        return value
    if isinstance(value, LostMarkup):
        return MarkedText.of(str(value), Origin.LOST)
    if isinstance(value, str):
        return value
    text = str(value)
    if value is None or isinstance(value, int | float):
        return text
    if isinstance(value, list | tuple | dict | set | frozenset):
        return cast("str", lost(text, cast("object", value)))
    return MarkedText.of(text, Origin.LOST)  # what is in such an object is not known


def percent_formatted(pattern: str, values: Any) -> str:
    """`pattern % values`; plain `%s` and `%d` carry origins."""
    whole = str.__mod__(pattern, values)
    marked = MarkedText(pattern, origins_of(pattern))
    unnamed = iter(cast("tuple[object, ...]", values if isinstance(values, tuple) else (values,)))
    parts: list[str] = []
    end = 0
    for found in _CONVERSION.finditer(pattern):
        parts.append(marked[end : found.start()])
        end = found.end()
        if found[2] == "%":
            parts.append(marked[end - 1 : end])
        else:
            parts.append(text_of(cast("Mapping[str, object]", values)[found[1]] if found[1] else next(unnamed, "")))
    return _as_whole(whole, [*parts, marked[end:]], pattern, cast("object", values))


def formatted(
    pattern: str,
    whole: str,
    fields: Iterable[tuple[str, str | None, str | None, str | None]],
    get: Callable[[str], object],
) -> str:
    """`pattern.format(…)`; fields without a format of their own carry origins.

    Args:
        pattern: of the fields.
        whole: what it comes to.
        fields: `string.Formatter.parse` of the pattern.
        get: the value of a field, by its name or number.
    """
    origins = origins_of(pattern).translate(_WITHOUT_FLAGS)
    unnamed = itertools.count()
    parts: list[str] = []
    values: list[object] = []
    for literal, name, _, _ in fields:
        parts.append(MarkedText(literal, origins[:1] * len(literal)))
        if name is not None:
            values.append(get(name or str(next(unnamed))))
            parts.append(text_of(values[-1]))
    return _as_whole(whole, parts if len(set(origins)) <= 1 else [], pattern, values)


def _as_whole(whole: str, parts: list[str], *sources: object) -> str:
    text = joined(parts)
    return text if text.plain == whole else cast("str", lost(whole, *sources))
