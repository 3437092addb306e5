"""Server-sent events as bytes: what surrounds the text of one choice is made once, not per token.

data: {"id":…,"object":…,"created":…,"model":…,"choices":[{"index":0,"text":"  TEXT  ","logprobs":…,"finish_reason":…}]}
└─────────────────────────── before ─────────────────────────────────────────┘      └────────── after ──────────┘
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from openinfer_server.http.api_errors import ApiError
from openinfer_server.openai.objects import Usage
from openinfer_server.request.plan import StreamUsage

DONE_DATA = "[DONE]"  # data of the last event of a stream
DONE = f"data: {DONE_DATA}\n\n".encode()
_END = b"}\n\n"


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """What all events of one response share."""

    id: str
    object: str  # of its events
    created: int
    model: str
    usage: StreamUsage
    tells_token_ids: bool = False
    may_call: bool = False  # whether an answer may have calls and no content

    def begin(self) -> bytes:
        fields = {"id": self.id, "object": self.object, "created": self.created, "model": self.model}
        return b"data: " + msgspec.json.encode(fields)[:-1] + b',"choices":['

    def end(self) -> bytes:
        """An event from the end of its choices on; where each event has its usage, that still has to follow."""
        if self.usage.every:
            return b"]"
        return b"]" + (b',"usage":null' if self.usage.last else b"") + _END

    def usage_event(self, usage: Usage) -> bytes:
        return self.begin() + b"]" + usage_end(usage)


@dataclass(frozen=True, slots=True)
class EventFrame:
    """Bytes around the text of one choice's events. Texts are given JSON-escaped, without quotes."""

    before: bytes
    after: bytes  # of an event with text alone
    _between: bytes  # from the text to the log-probabilities
    _end: bytes
    _begin: bytes  # up to what came
    _empty: bytes  # that nothing came
    first: bytes  # event that begins the choice; may be empty

    def text_event(self, escaped: bytes, logprobs: bytes = b"null", further: bytes = b"") -> bytes:
        """`further` are fields of the choice, each after a comma."""
        parts = (self.before, escaped, self._between, logprobs, b',"finish_reason":null', further, b"}", self._end)
        return b"".join(parts)

    def finish_event(
        self, reason: str, stop_reason: str | int | None, further: bytes = b"", *, came: bytes | None = None
    ) -> bytes:
        """`came` stands in the place of nothing."""
        why = b',"logprobs":null,"finish_reason":"%b","stop_reason":%b' % (
            reason.encode(),
            msgspec.json.encode(stop_reason),
        )
        return b"".join((self._begin, self._empty if came is None else came, why, further, b"}", self._end))

    def first_event(self, prompt_token_ids: Sequence[int]) -> bytes:
        """`first` with the ids of the prompt."""
        ended = self.first.removesuffix(_END)
        return ended + ids_field("prompt_token_ids", prompt_token_ids) + self.first[len(ended) :]


def ids_field(name: str, token_ids: Sequence[int]) -> bytes:
    """A further field with token ids."""
    return b',"%b":%b' % (name.encode(), msgspec.json.encode(token_ids))


class NewTokenIds(list[int]):
    """Tokens that no event has told yet."""

    def field(self) -> bytes:
        """The field that tells them."""
        told = ids_field("token_ids", self)
        self.clear()
        return told


def usage_end(usage: Usage) -> bytes:
    """An event from its usage on."""
    return b',"usage":' + msgspec.json.encode(usage) + _END


FrameMaker: TypeAlias = Callable[[ResponseHead, int], EventFrame]


def completion_frame(head: ResponseHead, index: int) -> EventFrame:
    return _frame(head, index, opening=b'"text":"', closing=b'"', empty=b'"text":""')


def chat_frame(head: ResponseHead, index: int) -> EventFrame:
    """Events of `/v1/chat/completions`; the first one names the role."""
    role = b'"delta":{"role":"assistant","content":""}'
    return _frame(head, index, opening=b'"delta":{"content":"', closing=b'"}', empty=b'"delta":{}', first=role)


def chat_delta_frame(head: ResponseHead, index: int) -> EventFrame:
    """Events of `/v1/chat/completions` whose text is the inside of the whole `delta` object.

    Where there may be calls and no content, the first one says null, as OpenAI's does before calls.
    """
    role = b'"delta":{"role":"assistant","content":%b}' % (b"null" if head.may_call else b'""')
    return _frame(head, index, opening=b'"delta":{', closing=b"}", empty=b'"delta":{}', first=role)


def _frame(
    head: ResponseHead, index: int, *, opening: bytes, closing: bytes, empty: bytes, first: bytes | None = None
) -> EventFrame:
    begin = head.begin() + b'{"index":%d,' % index
    end = head.end()
    plain = b',"logprobs":null,"finish_reason":null}' + end
    return EventFrame(
        before=begin + opening,
        after=closing + plain,
        _between=closing + b',"logprobs":',
        _end=end,
        _begin=begin,
        _empty=empty,
        first=b"" if first is None else begin + first + plain,
    )


def error_event(error: ApiError) -> bytes:
    """What a stream that failed after its head ends with; the SDK raises it."""
    return b"data: " + error.to_json() + b"\n\n"
