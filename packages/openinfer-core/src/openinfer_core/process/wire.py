"""The wire between a frontend process and an engine process: length-prefixed msgspec frames, no pickle.

    connect ─► Hello ─► Welcome | StartRefusal       (client ► engine, engine ► client)
    Submit | SubmitAlike | Abort | AskStats | Control | Close  ─►  requests, any time
    KnownPrompt?, PromptPart …, Submit | SubmitAlike           ─►  one with a long prompt
    ◄─ Events (one per step) | Stats | Controlled    answers
    ◄─ Ended                                         the last frame, where there is a reason to tell

A frame is a little-endian u32 length and that many bytes of msgpack. End of file means that the other side is
gone. The link is a Unix stream socket in a folder only its owner can enter, or loopback TCP where there are
none; either way the client shows a secret token first, because every process of the machine can reach a port.
"""

import struct
from typing import TypeAlias

import msgspec

from openinfer_core.control import ControlCommand
from openinfer_core.engine import EngineInfo, EngineStats
from openinfer_core.errors import ContractViolation, EngineClosed, Refused
from openinfer_core.events import TokenEvent
from openinfer_core.request import GenerateRequest, RequestId, RetainedPrefix, with_fields
from openinfer_core.sampling import Grammar, TokenIds

ENDED = "the engine has ended"  # the refusal of a command that came too late

PART_IDS = 2**14  # of a prompt in one frame: 0.3 ms of decoding
MAX_FRAME_BYTES = 256 * 2**20  # a longer frame is a broken peer, not a request
_LENGTH = struct.Struct("<I")


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """First frame of a client."""

    token: str


class BriefHello(Hello, frozen=True, array_like=True, tag="brief_hello"):
    """As `Hello`, of a client by whose link no long prompts come: it keeps none (`KnownPrompt`)."""


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """The engine is loaded and serves this link."""

    info: EngineInfo
    kept_ids: int = 0
    """Ids of prompts that this link may keep (`KnownPrompt`)."""


class StartRefusal(msgspec.Struct, frozen=True, array_like=True, tag="refusal"):
    """The engine could not start; the message is for the person who started it."""

    message: str


class Submit(msgspec.Struct, frozen=True, array_like=True, tag="submit"):
    """A request; ids are the link's own."""

    request: GenerateRequest


class SubmitAlike(msgspec.Struct, frozen=True, array_like=True, tag="submit_alike"):
    """A request without its grammar, which is that of the link's last request that had one.

    So the outputs of one request (`n`) bring a grammar of 237,000 characters once, not 16 times.
    """

    request: GenerateRequest


class PromptPart(msgspec.Struct, frozen=True, array_like=True, tag="prompt_part"):
    """Ids of the next request's prompt, which come before those that it brings itself.

    A frame is encoded and decoded in one call, during which no other thread of the process runs: 290,000 ids in one
    would stop an engine's steps, and with them every stream, for 7 ms.
    """

    token_ids: TokenIds
    retained_prefixes: tuple[RetainedPrefix, ...] = ()
    """The next request's, with the last part: they may be longer than what the request brings itself."""


class KnownPrompt(msgspec.Struct, frozen=True, array_like=True, tag="known_prompt"):
    """Of a long prompt, before its parts: where it is kept, and what the engine has of it (`kept_prompts.py`)."""

    place: int
    """Where it is kept when it is whole, for the next turn, instead of what was there."""
    like: int | None
    """The place of a prompt that it begins like; None for none."""
    num_tokens: int
    """Of its beginning, which that one has and which are not sent."""
    forgotten: tuple[int, ...] = ()
    """Places whose prompts are kept no longer, `like` may be one of them."""
    retained_prefixes: tuple[RetainedPrefix, ...] = ()
    """As in `PromptPart`."""


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """Ends a request."""

    request_id: RequestId


class AskStats(msgspec.Struct, frozen=True, array_like=True, tag="ask_stats"):
    """Asks for one `Stats`; answered in order."""


class Control(msgspec.Struct, frozen=True, array_like=True, tag="control"):
    """A command, answered with `Controlled` of the same number."""

    number: int
    command: ControlCommand


class Close(msgspec.Struct, frozen=True, array_like=True, tag="close"):
    """Ends the engine process."""


class Events(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="e"):
    """All events of one step for this link."""

    events: list[TokenEvent]


class Stats(msgspec.Struct, frozen=True, array_like=True, tag="stats"):
    """Answer to `AskStats`."""

    stats: EngineStats


class Controlled(msgspec.Struct, frozen=True, array_like=True, tag="controlled"):
    """Answer to `Control`."""

    number: int
    refusal: str | None
    """Why the command was not obeyed."""


class Ended(msgspec.Struct, frozen=True, array_like=True, tag="ended"):
    """The engine ends by itself, for a reason that clients may be told."""

    reason: str


def submission(request: GenerateRequest, *, last: Grammar | None) -> Submit | SubmitAlike:
    """How a request is sent on a link whose last request with a grammar had `last`."""
    if last is None or request.sampling.grammar is not last:
        return Submit(request)
    return SubmitAlike(_with_grammar(request, None))


def submitted(message: Submit | SubmitAlike, *, last: Grammar | None) -> GenerateRequest:
    """The request that `submission` was given.

    Raises:
        ContractViolation: it leaves its grammar out, and the link has had none.
    """
    if isinstance(message, Submit):
        return message.request
    if last is None or message.request.sampling.grammar is not None:
        raise ContractViolation("a request leaves out its grammar, and there is none before it, or it has its own")
    return _with_grammar(message.request, last)


def _with_grammar(request: GenerateRequest, grammar: Grammar | None) -> GenerateRequest:
    return with_fields(request, sampling=msgspec.structs.replace(request.sampling, grammar=grammar))


def raise_refusal(refusal: str | None) -> None:
    """What `EngineHandle.control` raises for the answer to a command."""
    if refusal == ENDED:
        raise EngineClosed(refusal)
    if refusal is not None:
        raise Refused(refusal)


ToEngine: TypeAlias = (
    Hello | BriefHello | Submit | SubmitAlike | KnownPrompt | PromptPart | Abort | AskStats | Control | Close
)
ToClient: TypeAlias = Welcome | StartRefusal | Events | Stats | Controlled | Ended

_encoder = msgspec.msgpack.Encoder()
to_engine_decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
to_client_decoder: msgspec.msgpack.Decoder[ToClient] = msgspec.msgpack.Decoder(ToClient)


def encode_frame(message: msgspec.Struct) -> bytearray:
    """One frame, length and body in one buffer, of a message of this wire or of another that cuts its bytes alike."""
    frame = bytearray(_LENGTH.size)
    _encoder.encode_into(message, frame, _LENGTH.size)
    body_bytes = len(frame) - _LENGTH.size
    if body_bytes > MAX_FRAME_BYTES:
        raise ContractViolation(f"a frame of {body_bytes} bytes exceeds the limit of {MAX_FRAME_BYTES}")
    _LENGTH.pack_into(frame, 0, body_bytes)
    return frame


class FrameBuffer:
    """Cuts received bytes into frames; its length is the number of bytes that wait for the rest of their frame.

    Args:
        max_frame_bytes: of a peer that is not known yet, less than `MAX_FRAME_BYTES`.
    """

    __slots__ = ("_data", "_max_frame_bytes")

    def __init__(self, *, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._data = bytearray()
        self._max_frame_bytes = max_frame_bytes

    def __len__(self) -> int:
        return len(self._data)

    def feed(self, data: "bytes | memoryview") -> list[bytes]:
        """Takes received bytes; returns the bodies that are complete.

        Raises:
            ContractViolation: the peer announces a frame beyond `max_frame_bytes`.
        """
        self._data += data
        frames: list[bytes] = []
        begin, available = 0, len(self._data)
        while available - begin >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._data, begin)
            # Before the bytes are waited for: a peer that lies would have us buffer up to 4 GiB.
            if length > self._max_frame_bytes:
                raise ContractViolation(f"the peer announces a frame of {length} bytes")
            end = begin + _LENGTH.size + length
            if end > available:
                break
            frames.append(bytes(memoryview(self._data)[begin + _LENGTH.size : end]))
            begin = end
        if begin:
            del self._data[:begin]
        return frames
