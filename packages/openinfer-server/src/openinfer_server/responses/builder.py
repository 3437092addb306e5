"""`ResponseBuilder`: deltas of an answer become items, and each step of theirs an event.

    reasoning ─► OutputReasoning      content ─► OutputMessage      call ─► OutputFunctionCall

    created, in_progress, (item added, part added, delta*, done, part done, item done)*, completed | incomplete | failed

A streamed response and a whole one come out of the same builder; the latter's events go nowhere.
"""

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import msgspec

from openinfer_core.events import FinishReason
from openinfer_server.parsers.deltas import CallArguments, CallEnd, CallStart, ContentDelta, Delta, ReasoningDelta
from openinfer_server.responses.events import (
    ArgumentsDelta,
    ArgumentsDone,
    Completed,
    Created,
    FailedEvent,
    Incomplete,
    InProgress,
    ItemAdded,
    ItemDone,
    Lifecycle,
    PartAdded,
    PartDone,
    Queued,
    ReasoningDeltaEvent,
    ReasoningDone,
    ResponseEvent,
    TextDelta,
    TextDone,
)
from openinfer_server.responses.objects import (
    ENDED,
    IncompleteDetails,
    ItemStatus,
    OutputFunctionCall,
    OutputItem,
    OutputLogprob,
    OutputMessage,
    OutputReasoning,
    ReasoningContent,
    ResponseFault,
    ResponseObject,
    ResponseUsage,
    Status,
    TextContent,
)
from openinfer_server.responses.offered import CallName

ItemT = TypeVar("ItemT", OutputMessage, OutputReasoning, OutputFunctionCall)
Emit = Callable[[ResponseEvent], None]


class ResponseBuilder:
    """One response as it comes into being.

    Attributes:
        response: as it is now; its texts are filled in when their items end.

    Args:
        names: what the client calls functions in namespaces, by their names for the model.
    """

    def __init__(self, response: ResponseObject, emit: Emit, names: Mapping[str, CallName]) -> None:
        self.response = response
        self._emit = emit
        self._names = names
        self._number = -1
        self._open: OutputItem | None = None
        self._pieces: list[str] = []
        self._logprobs: list[OutputLogprob] = []

    @property
    def ended(self) -> bool:
        return self.response.status in ENDED

    @property
    def numbered(self) -> bool:
        return self._number >= 0

    def queue(self) -> None:
        self.response.status = "queued"
        self._tell(Created)
        self._tell(Queued)

    def begin(self) -> None:
        if self.response.status == "queued":
            self.response.status = "in_progress"
        else:
            self._tell(Created)
        self._tell(InProgress)

    def take(self, deltas: Sequence[Delta], logprobs: Sequence[OutputLogprob] = ()) -> None:
        """What the answer goes on with."""
        for delta in deltas:
            match delta:
                case ContentDelta():
                    self._text(delta.text, logprobs)
                    logprobs = ()
                case ReasoningDelta():
                    self._reasoning(delta.text)
                case CallStart():
                    self._call(delta)
                case CallArguments():
                    self._arguments(delta.text)
                case CallEnd():
                    self._close("completed" if _is_json("".join(self._pieces)) else "incomplete")

    def finish(self, reason: FinishReason, usage: ResponseUsage) -> None:
        cut = reason is FinishReason.LENGTH
        self._close("incomplete" if cut else "completed")
        self.response.usage = usage
        if cut:
            self.response.incomplete_details = IncompleteDetails(reason="max_output_tokens")
        self._end("incomplete" if cut else "completed", Incomplete if cut else Completed)

    def fail(self, code: str, message: str) -> None:
        self._close("incomplete")
        self.response.error = ResponseFault(code=code, message=message)
        self._end("failed", FailedEvent)

    def cancel(self) -> None:
        self._close("incomplete")
        self._end("cancelled", Incomplete)

    def _end(self, status: Status, kind: type[Lifecycle]) -> None:
        self.response.status = status
        self.response.completed_at = int(time.time())
        self._tell(kind)

    def _tell(self, kind: type[Lifecycle]) -> None:
        self._emit(kind(sequence_number=self._next(), response=self.response))

    def _next(self) -> int:
        self._number += 1
        return self._number

    @property
    def _index(self) -> int:
        return len(self.response.output) - 1

    # items

    def _text(self, text: str, logprobs: Sequence[OutputLogprob]) -> None:
        item = self._open
        if not isinstance(item, OutputMessage):
            item = self._begin(OutputMessage(id=_new_id("msg"), content=[]))
            part = TextContent()
            self._emit(PartAdded(sequence_number=self._next(), item_id=item.id, output_index=self._index, part=part))
            item.content.append(part)
        self._pieces.append(text)
        self._logprobs += logprobs
        self._emit(
            TextDelta(
                sequence_number=self._next(),
                item_id=item.id,
                output_index=self._index,
                delta=text,
                logprobs=list(logprobs),
            )
        )

    def _reasoning(self, text: str) -> None:
        item = self._open
        if not isinstance(item, OutputReasoning):
            item = self._begin(OutputReasoning(id=_new_id("rs"), content=[]))
            part = ReasoningContent()
            self._emit(PartAdded(sequence_number=self._next(), item_id=item.id, output_index=self._index, part=part))
            item.content.append(part)
        self._pieces.append(text)
        self._emit(
            ReasoningDeltaEvent(sequence_number=self._next(), item_id=item.id, output_index=self._index, delta=text)
        )

    def _call(self, start: CallStart) -> None:
        called = self._names.get(start.name) or CallName(None, start.name)
        self._begin(
            OutputFunctionCall(
                id=_new_id("fc"),
                call_id=start.call_id,
                name=called.name,
                namespace=msgspec.UNSET if called.namespace is None else called.namespace,
            )
        )

    def _arguments(self, text: str) -> None:
        item = self._open
        if isinstance(item, OutputFunctionCall):
            self._pieces.append(text)
            self._emit(
                ArgumentsDelta(sequence_number=self._next(), item_id=item.id, output_index=self._index, delta=text)
            )

    def _begin(self, item: ItemT) -> ItemT:
        self._close("completed")
        self._open = item
        self.response.output.append(item)
        self._emit(ItemAdded(sequence_number=self._next(), output_index=self._index, item=item))
        return item

    def _close(self, status: ItemStatus) -> None:
        item, self._open = self._open, None
        if item is None:
            return
        text = "".join(self._pieces)
        self._pieces.clear()
        item.status = status
        match item:
            case OutputMessage():
                self._close_message(item, text)
            case OutputReasoning():
                self._close_reasoning(item, text)
            case OutputFunctionCall():
                item.arguments = text
                self._emit(
                    ArgumentsDone(
                        sequence_number=self._next(),
                        item_id=item.id,
                        output_index=self._index,
                        name=item.name,
                        arguments=text,
                    )
                )
        self._emit(ItemDone(sequence_number=self._next(), output_index=self._index, item=item))

    def _close_message(self, item: OutputMessage, text: str) -> None:
        (part,) = item.content
        part.text, part.logprobs = text, self._logprobs
        self._logprobs = []
        self._emit(
            TextDone(
                sequence_number=self._next(),
                item_id=item.id,
                output_index=self._index,
                text=text,
                logprobs=part.logprobs,
            )
        )
        self._emit(PartDone(sequence_number=self._next(), item_id=item.id, output_index=self._index, part=part))

    def _close_reasoning(self, item: OutputReasoning, text: str) -> None:
        (part,) = item.content
        part.text = text
        self._emit(ReasoningDone(sequence_number=self._next(), item_id=item.id, output_index=self._index, text=text))
        self._emit(PartDone(sequence_number=self._next(), item_id=item.id, output_index=self._index, part=part))


def _is_json(arguments: str) -> bool:
    """Whether a call is whole: the parser ends it, too, where the answer was cut short."""
    try:
        msgspec.json.decode(arguments)
    except (msgspec.MsgspecError, RecursionError):
        return False
    return True


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"
