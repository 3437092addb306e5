"""`EventStream`: where the sinks of a streamed response write their events."""

from collections.abc import Callable

from openinfer_server.http.writers import StreamWriter
from openinfer_server.openai.event_frames import usage_end
from openinfer_server.openai.objects import Usage


class EventStream:
    """The events of one response, in OpenAI's two older shapes.

    Args:
        writer: of the response.
        dirty: writers that the link to the engine flushes.
        usage: the tokens so far, if every event says them.
    """

    __slots__ = ("_dirty", "_usage", "writer")

    def __init__(
        self, writer: StreamWriter, dirty: list[StreamWriter], usage: Callable[[], Usage] | None = None
    ) -> None:
        self._dirty = dirty
        self._usage = usage
        self.writer = writer

    def write(self, event: bytes) -> None:
        self.writer.events.append(event if self._usage is None else event + usage_end(self._usage()))
        self.writer.mark_dirty(self._dirty)
