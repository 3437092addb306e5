"""`TrimmedText`: text without the white space next to tags, known only when the tag comes."""

from collections.abc import Callable

from openinfer_server.parsers.deltas import ContentDelta, Delta, ReasoningDelta

SPACE = " \t\r\n"
MAX_SPACE = 256  # white space that is held back at most; of more the last part is held


class TrimmedText:
    """Hands text on, but holds white space at its end until it is known whether a tag follows.

    Args:
        kind: of deltas that are made of it.
        say: takes them.
        before_tags: whether tags may follow the text; otherwise nothing is held, and only white space after tags goes.

    Attributes:
        is_clear: whether a piece that does not end with white space would be said as it is.
        kind: see above.
        skipping: whether white space that comes next belongs to a tag before it.
    """

    __slots__ = ("_before_tags", "_say", "_space", "is_clear", "kind", "skipping")

    def __init__(
        self,
        kind: type[ContentDelta] | type[ReasoningDelta],
        say: Callable[[Delta], None],
        *,
        before_tags: bool = True,
    ) -> None:
        self.kind = kind
        self._before_tags = before_tags
        self._say = say
        self.is_clear = True
        self.skipping = False
        self._space = ""

    def write(self, text: str) -> None:
        if self.skipping:
            text = text.lstrip(SPACE)
            if not text:
                return
            self.skipping = False
        kept = text.rstrip(SPACE) if self._before_tags else text
        if kept:
            self._say(self.kind(self._space + kept))
            self._space = text[len(kept) :]
        else:
            self._space += text
        if len(self._space) > MAX_SPACE:
            self._say(self.kind(self._space[:-MAX_SPACE]))
            self._space = self._space[-MAX_SPACE:]
        self.is_clear = not self._space

    def at_tag(self) -> None:
        """A tag is here: white space before and after it belongs to it."""
        self._space = ""
        self.skipping, self.is_clear = True, False

    def flush(self) -> None:
        if self._space:
            self._say(self.kind(self._space))
            self._space = ""
