"""A large body's JSON, decoded in slices, unless it is a few long texts.

The decoder holds the interpreter for as long as it works, also in a thread: a megabyte of small values takes it 20 ms,
and every stream waits. Here one pass in Python, which gives the interpreter up, cuts the text between values into
slices that are decoded one by one. A container becomes a list or dict of its own as soon as a slice of it is full, and
with it all that it stands in; smaller ones are decoded with their neighbours.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import msgspec

from openinfer_server.http.body_checks import num_elements
from openinfer_server.http.nulls import without_nulls

T = TypeVar("T")

SLICE_BYTES = 32 * 2**10  # a slice is less than twice as long, but for long texts in it: 2 ms of decoding
WHOLE_BYTES, WHOLE_ELEMENTS = 2**20, 2**14  # of a body that is decoded in one call, like a slice of many values
# Of longer texts the end is looked for by itself (`_end_of_text`): the pattern would read their beginning four times.
_TEXT = rb'"[^"\\]{0,512}+(?:\\.[^"\\]{0,64}+){0,16}+"'
# Some values that are no containers, with the commas after them; another one of them, or a name; a bracket; a long text
# begins. All are short work, since a match holds the interpreter, too.
_MARKS = re.compile(rb'(?:(?:[^"\[\]{},]|%b)*+,){1,64}|%b|[\[\]{}"]' % (_TEXT, _TEXT), re.DOTALL)
_ESCAPES = re.compile(rb'[^"\\]{0,64}+(?:\\.[^"\\]{0,64}+){0,4096}+', re.DOTALL)  # where they are close together
_QUOTE = ord('"')
_COMMA, _OBJECT, _ARRAY, _CLOSING = ord(","), ord("{"), ord("["), b"]}"

Decode = Callable[[bytes], Any]


def decode_body(
    decoder: "msgspec.json.Decoder[T]",
    body: bytes,
    *,
    decode: Decode = msgspec.json.decode,
    held: list[Any] | None = None,
    elements: int | None = None,
) -> T:
    """The body as the decoder's type; fields that are null and unknown to it are absent.

    Args:
        decoder: of the route's type.
        body: JSON.
        decode: decodes a slice.
        held: gets what a large body was decoded to, parts of which are parts of the result.
        elements: `num_elements` of it, if they were counted.

    Raises:
        msgspec.MsgspecError, UnicodeDecodeError, RecursionError: it is no JSON, or not of the type.
    """
    # A body of few values is one of long texts, which take a millisecond for 500 KB; what else it has, no longer.
    if len(body) <= SLICE_BYTES or (len(body) <= WHOLE_BYTES and _are_few(body, elements)):
        try:
            return decoder.decode(body)
        except msgspec.ValidationError:
            if b"null" not in body:
                raise
    value = decode_in_slices(body, decode)
    if held is not None:
        held.append(value)
    try:
        return msgspec.convert(value, decoder.type)
    except msgspec.ValidationError:
        if b"null" not in body:
            raise
        return msgspec.convert(without_nulls(value), decoder.type)


def _are_few(body: bytes, elements: int | None) -> bool:
    return (num_elements(body) if elements is None else elements) <= WHOLE_ELEMENTS


def decode_in_slices(body: bytes, decode: Decode = msgspec.json.decode) -> Any:
    """The value of a JSON text; raises as `msgspec.json.decode`."""
    text = bytes(msgspec.json.decode(body, type=msgspec.Raw))  # well-formed, and without white space around it
    if len(text) <= SLICE_BYTES or text[0] not in (_OBJECT, _ARRAY):
        return decode(text)
    return _Cutter(text, decode).value()


@dataclass(slots=True)
class _Container:
    """An object or array that has begun and not ended."""

    begin: int  # of its first value
    chunk_begin: int  # of what has not been decoded yet
    value_begin: int  # of the value, and of its name in an object, that is not over yet
    is_object: bool
    decoded: "dict[str, Any] | list[Any] | None" = None  # what has been; None while nothing was cut
    name: str = ""  # in an object, of the value that was cut
    is_cut_value: bool = False  # whether its last value was cut, and is decoded


class _Cutter:
    """One pass over a text."""

    def __init__(self, text: bytes, decode: Decode) -> None:
        self._text = text
        self._decode = decode
        self._open: list[_Container] = []
        self._root: Any = None

    def value(self) -> Any:
        after = 0
        while mark := _MARKS.search(self._text, after):
            after = mark.end()
            at, kind = after - 1, self._text[after - 1]
            if kind == _COMMA:
                self._next(self._open[-1], at)
            elif kind in (_OBJECT, _ARRAY):
                self._open.append(_Container(at + 1, at + 1, at + 1, kind == _OBJECT))
            elif kind in _CLOSING:
                self._close(at)
            elif mark.start() == at:
                after = self._end_of_text(after)
        return self._root

    def _end_of_text(self, after: int) -> int:
        # A pattern takes 2.5 ns for a character, looking for a quote thirty times less.
        while True:
            quote = self._text.index(_QUOTE, after)
            text = self._text[after:quote]
            if (len(text) - len(text.rstrip(b"\\"))) % 2 == 0:
                return quote + 1
            after = cast("re.Match[bytes]", _ESCAPES.match(self._text, quote + 1)).end()

    def _next(self, container: _Container, at: int) -> None:
        """A value is over, or several, and another one comes."""
        if container.is_cut_value:  # then the first comma is all that is left of it
            container.is_cut_value = False
            container.chunk_begin = self._text.index(b",", container.chunk_begin) + 1
        if at - container.chunk_begin >= SLICE_BYTES:
            self._cut()
            self._take(container, at)
        container.value_begin = at + 1

    def _close(self, at: int) -> None:
        container = self._open[-1]
        is_root = len(self._open) == 1
        if container.decoded is not None or is_root or at - container.chunk_begin >= SLICE_BYTES:
            self._cut()
            if not container.is_cut_value:
                self._take(container, at)
        self._open.pop()
        if is_root:
            self._root = container.decoded
        elif container.decoded is not None:
            parent = self._open[-1]
            if parent.is_object:
                cast("dict[str, Any]", parent.decoded)[parent.name] = container.decoded
            else:
                cast("list[Any]", parent.decoded).append(container.decoded)
            parent.is_cut_value, parent.chunk_begin = True, at + 1

    def _cut(self) -> None:
        """The innermost container is decoded by itself from here on, and so is all that it stands in."""
        for place, container in enumerate(self._open):
            is_new = container.decoded is None
            if is_new:
                container.decoded = {} if container.is_object else []
            inner = self._open[place + 1] if place + 1 < len(self._open) else None
            if inner is not None and inner.decoded is None:
                self._take(container, container.value_begin - 1)
                if container.is_object:
                    name = self._text[container.value_begin : inner.begin - 1].rstrip()
                    container.name = self._decode(name[:-1])

    def _take(self, container: _Container, end: int) -> None:
        """Decodes what there is of a container up to a comma or its end."""
        chunk = self._text[container.chunk_begin : end]
        container.chunk_begin = end + 1
        if not chunk.strip():
            return
        if container.is_object:
            cast("dict[str, Any]", container.decoded).update(self._decode(b"{" + chunk + b"}"))
        else:
            cast("list[Any]", container.decoded).extend(self._decode(b"[" + chunk + b"]"))
