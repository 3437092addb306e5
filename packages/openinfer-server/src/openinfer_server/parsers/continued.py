"""`ContinuedParser`: the parser of an answer whose beginning the client has written."""

from collections.abc import Sequence

from openinfer_server.parsers.deltas import CallStart, ContentDelta, Delta, ReasoningDelta
from openinfer_server.parsers.output import OutputParser
from openinfer_server.parsers.reasoning_calls import BeginToken

_TEXTS = (ContentDelta, ReasoningDelta)
_NO_TAG = "\ue000"


class CallBegun(Exception):
    """The beginning has a call, or the beginning of one, which its client cannot get the rest of."""


class ContinuedParser(OutputParser):
    """Says what follows the beginning, and nothing of the beginning itself."""

    __slots__ = ("_held", "_num_begun")

    def begin(self, text: str, *, probe: OutputParser) -> None:
        """Takes the beginning, once and first.

        Args:
            text: the beginning.
            probe: a parser of the same answer, which is used up.

        Raises:
            CallBegun: it has a call.
            ParserFault: a parser raises.
        """
        self._num_begun = len(text)
        if any(isinstance(delta, CallStart) for delta in super().feed(text)):
            raise CallBegun
        probe.feed(text)
        # what is not said yet, because it may turn out to be a tag or white space before one: no tag has this character
        rest = [*probe.feed(_NO_TAG), *probe.finish()]
        self._held = {kind: _text(rest, kind).removesuffix(_NO_TAG) for kind in _TEXTS}

    def feed(self, text: str, begun: Sequence[BeginToken] = ()) -> list[Delta]:
        shifted = [(self._num_begun + place, token) for place, token in begun]  # places are of the whole answer
        return self._without_held(super().feed(text, shifted))

    def finish(self) -> list[Delta]:
        return self._without_held(super().finish())

    def _without_held(self, deltas: list[Delta]) -> list[Delta]:
        if not self._held:
            return deltas
        kept: list[Delta] = []
        for delta in deltas:
            if not isinstance(delta, ContentDelta | ReasoningDelta):
                kept.append(delta)
                continue
            kind, held = type(delta), self._held.pop(type(delta), "")
            if held.startswith(delta.text) and held != delta.text:
                self._held[kind] = held[len(delta.text) :]
            elif delta.text != held:
                kept.append(kind(delta.text.removeprefix(held)))
        return kept


def _text(deltas: Sequence[Delta], kind: type[ContentDelta] | type[ReasoningDelta]) -> str:
    return "".join(delta.text for delta in deltas if isinstance(delta, kind))
