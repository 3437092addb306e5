"""Token ids to text, one token at a time, so that streamed and whole answers are the same text.

`feed` returns the text that is certain after a token; what may still change (a character whose bytes are not all
there) is held until the next token or `finish`. Both answers of the server are built from these, therefore equal.
"""

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
_UTF8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer(Protocol):
    """The text of one sequence of tokens."""

    def feed(self, token_id: int) -> str:
        """Takes the next token; returns the text that became certain."""
        ...

    def finish(self) -> str:
        """Returns what was held; incomplete characters become U+FFFD."""
        ...


class ByteDetokenizer:
    """For tokens that have bytes of their own: a table of them and a UTF-8 decoder with a pending tail."""

    __slots__ = ("_decoder", "_raw", "_strips")

    def __init__(self, raw: Sequence[bytes], *, strips_first_space: bool = False) -> None:
        self._raw = raw
        self._decoder = _UTF8("replace")
        self._strips = strips_first_space

    def feed(self, token_id: int) -> str:
        text = self._decoder.decode(self._raw[token_id])
        if self._strips and text:
            self._strips = False
            return text.removeprefix(" ")
        return text

    @property
    def pending(self) -> bool:
        return bool(self._decoder.getstate()[0])

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


# A character has at most four bytes, so at most four tokens; text that ends in U+FFFD for longer really does.
_MAX_HELD_TOKENS = 8


class WindowDetokenizer:
    """For all other decoders: decodes a short window of tokens with and without the new one.

        ids:   ... [begin ........ shown ........ end]
                    context, shown    not yet shown

    Spaces and byte-fallback depend on the neighbours, so the window begins a few tokens early; it starts with the
    end of the prompt, because a first token alone would lose its leading space.
    """

    __slots__ = ("_begin", "_decode", "_ids", "_shown", "_shown_text")

    def __init__(self, decode: Callable[[list[int]], str], context: Sequence[int]) -> None:
        self._decode = decode
        self._ids = list(context)
        self._begin, self._shown = 0, len(self._ids)
        self._shown_text = decode(self._ids)

    def feed(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._decode(self._ids[self._begin :])
        if text.endswith(REPLACEMENT) and len(self._ids) - self._shown < _MAX_HELD_TOKENS:
            return ""
        return self._show(text)

    def finish(self) -> str:
        return self._show(self._decode(self._ids[self._begin :]))

    def _show(self, text: str) -> str:
        new = text[len(self._shown_text) :]
        self._begin, self._shown = self._shown, len(self._ids)
        self._shown_text = self._decode(self._ids[self._begin :])
        return new
