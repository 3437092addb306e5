"""`AnswerLines`: deltas of an answer become lines of a stream, or are kept for one object.

A call comes whole, in the line after its last argument: Ollama's clients know no pieces of one.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from openinfer_ollama.fields import NAMES
from openinfer_ollama.objects import (
    UNSET,
    AnswerMessage,
    CalledFunction,
    CallObject,
    ChatLine,
    ErrorObject,
    GenerateLine,
    Line,
    now,
)
from openinfer_server import JSON_LINES, ApiError, Ended
from openinfer_server.parsers import CallArguments, CallEnd, CallStart, ContentDelta, Delta, ReasoningDelta

JSON = b"application/json"


@dataclass(slots=True)
class Piece:
    """What came of an answer: all of it, or what one line has."""

    content: list[str] = field(default_factory=list[str])
    thinking: list[str] = field(default_factory=list[str])
    calls: list[CallObject] = field(default_factory=list[CallObject])


def chat_line(piece: Piece, **known: Any) -> ChatLine:
    message = AnswerMessage(
        content="".join(piece.content),
        thinking="".join(piece.thinking) or UNSET,
        tool_calls=piece.calls or UNSET,
    )
    return ChatLine(message=message, **known)


def generate_line(piece: Piece, **known: Any) -> GenerateLine:
    return GenerateLine(response="".join(piece.content), thinking="".join(piece.thinking) or UNSET, **known)


class AnswerLines:
    """How an answer is written: an `openinfer_server.AnswerForm`.

    Args:
        model: the name that the client asked for.
        line: makes an object of a piece of the answer.
        streams: whether each piece has a line; otherwise there is one object.
        began_ns: monotonic clock of the request's arrival.
    """

    def __init__(self, model: str, line: Callable[..., Line], *, streams: bool, began_ns: int) -> None:
        self.streams = streams
        self.content_type = JSON_LINES if streams else JSON
        self._arguments: list[str] = []
        self._began_ns = began_ns
        self._call: CallStart | None = None
        self._line = line
        self._model = model
        self._piece = Piece()

    def take(self, delta: Delta) -> bytes:
        match delta:
            case ContentDelta(text):
                self._piece.content.append(text)
            case ReasoningDelta(text):
                self._piece.thinking.append(text)
            case CallStart():
                self._call = delta
                return b""
            case CallArguments(_, text):
                self._arguments.append(text)
                return b""
            case CallEnd():
                self._end_call()
        return self._write(self._line(self._taken(), model=self._model, created_at=now())) if self.streams else b""

    def end(self, ended: Ended) -> bytes:
        last = self._line(
            self._taken(),
            model=self._model,
            created_at=now(),
            done=True,
            done_reason=ended.finish_reason,
            total_duration=time.monotonic_ns() - self._began_ns,
            load_duration=0,  # it was loaded before the server answered at all
            prompt_eval_count=ended.prompt_tokens,
            prompt_eval_duration=_nanoseconds(ended.prefill_s),
            eval_count=ended.completion_tokens,
            eval_duration=_nanoseconds(ended.decode_s),
        )
        return self._write(last)

    def fail(self, error: ApiError) -> bytes:
        return error_json(error) + b"\n"

    def _end_call(self) -> None:
        call, text = self._call, "".join(self._arguments)
        self._call, self._arguments = None, []
        if call is not None:
            function = CalledFunction(index=call.index, name=call.name, arguments=_object(text))
            self._piece.calls.append(CallObject(id=call.call_id, function=function))

    def _taken(self) -> Piece:
        piece, self._piece = self._piece, Piece()
        return piece

    def _write(self, line: Line) -> bytes:
        return msgspec.json.encode(line) + (b"\n" if self.streams else b"")


def error_json(error: ApiError) -> bytes:
    """An error in Ollama's form, which has no place for the field's name but the sentence."""
    body = error.with_names(NAMES).body
    named = body.param is None or body.param in body.message
    return msgspec.json.encode(ErrorObject(body.message if named else f"{body.param}: {body.message}"))


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _object(arguments: str) -> dict[str, Any]:
    """A call's arguments; text that is no JSON object, of a call that was cut off, is an object with it, as templates
    write such a call when it comes back.
    """
    try:
        return msgspec.json.decode(arguments or "{}", type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        return {"arguments": arguments}
