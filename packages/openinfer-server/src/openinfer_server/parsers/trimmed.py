"""`TrimmedText`: text without the white space beside tags, known only when the tag comes."""

from collections.abc import Callable

SPACE = " \t\r\n"
MAX_SPACE = 256
"""White space that is held back at most; of more the last part is held."""


class TrimmedText:
    """Hands text on, but holds white space at its end until it is known whether a tag follows.

    Args:
        emit: takes the text, in pieces that are not empty.
        before_tags: whether tags may follow the text; otherwise nothing is held, and only white space after tags goes.
    """

    __slots__ = ("_before_tags", "_emit", "_skipping", "_space")

    def __init__(self, emit: Callable[[str], None], *, before_tags: bool = True) -> None:
        self._before_tags = before_tags
        self._emit = emit
        self._skipping = False
        self._space = ""

    def write(self, text: str) -> None:
        """Takes the next piece."""
        if self._skipping:
            text = text.lstrip(SPACE)
            if not text:
                return
            self._skipping = False
        kept = text.rstrip(SPACE) if self._before_tags else text
        if kept:
            self._emit(self._space + kept)
            self._space = text[len(kept) :]
        else:
            self._space += text
        if len(self._space) > MAX_SPACE:
            self._emit(self._space[:-MAX_SPACE])
            self._space = self._space[-MAX_SPACE:]

    def at_tag(self) -> None:
        """A tag is here: white space before and after it belongs to it."""
        self._space = ""
        self._skipping = True

    def flush(self) -> None:
        """The text has ended: its white space is its own."""
        if self._space:
            self._emit(self._space)
            self._space = ""
