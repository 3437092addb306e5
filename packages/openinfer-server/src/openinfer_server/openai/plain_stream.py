"""`PlainStream`: the path nearly all streamed tokens take. Its `tokens` is the server's hottest function."""

from openinfer_core.events import FinishReason, Tokens
from openinfer_server.http.writers import StreamWriter
from openinfer_server.openai.event_frames import EventFrame
from openinfer_server.output.response import Choice, Response
from openinfer_server.text.byte_table import ByteTable, escape_json
from openinfer_server.text.detokenizers import ByteDetokenizer


class PlainStream(Choice):
    """Streams text alone: byte-level vocabulary, no stop strings, no log-probabilities.

    Each token is three byte strings put together, two of them made before the first token and one at start-up.
    """

    __slots__ = ("_after", "_before", "_detokenizer", "_dirty", "_escaped", "_events", "_frame", "_pending", "_writer")

    def __init__(
        self,
        response: Response,
        index: int,
        *,
        prompt_tokens: int,
        echo: str,
        table: ByteTable,
        frame: EventFrame,
        writer: StreamWriter,
    ) -> None:
        super().__init__(response, index, prompt_tokens=prompt_tokens)
        self._before, self._after = frame.before, frame.after
        self._detokenizer = ByteDetokenizer(table.raw)
        self._dirty = response.link.dirty
        self._escaped = table.escaped
        self._frame = frame
        self._events = writer.events
        self._pending = False
        self._writer = writer
        if frame.first:
            self._events.append(frame.first)
        if echo:
            event = self._before + escape_json(echo) + self._after
            self._events.append(event)
            writer.max_buffered_bytes += len(event)

    def tokens(self, event: Tokens) -> None:
        for token_id in event.token_ids:
            escaped = self._escaped[token_id]
            if escaped is None or self._pending:
                escaped = self._decode(token_id)
            self._events.append(self._before + escaped + self._after)
        writer = self._writer
        if not writer.is_dirty:  # `mark_dirty`, without the call: this runs for every token of every stream
            writer.is_dirty = True
            self._dirty.append(writer)

    def conclude(self, reason: FinishReason) -> None:
        rest = self._detokenizer.finish()
        if rest:
            self._events.append(self._before + escape_json(rest) + self._after)
        self._events.append(self._frame.finish_event(reason, self.stop_reason))
        self._writer.mark_dirty(self._dirty)
        super().conclude(reason)

    def _decode(self, token_id: int) -> bytes:
        text = self._detokenizer.feed(token_id)
        self._pending = self._detokenizer.pending
        return escape_json(text)
