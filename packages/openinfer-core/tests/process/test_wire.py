"""Frames survive any cutting of the byte stream, and messages keep their bytes."""

import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from openinfer_core import (
    ContractViolation,
    EngineInfo,
    EngineStats,
    Failed,
    FailureKind,
    GenerateRequest,
    InvalidRequest,
    RequestId,
    SamplingParams,
    Tokens,
)
from openinfer_core.process.kept_prompts import PromptBuffer, prompt_parts
from openinfer_core.process.wire import (
    MAX_FRAME_BYTES,
    PART_IDS,
    Abort,
    AskStats,
    BriefHello,
    Close,
    Events,
    FrameBuffer,
    Hello,
    KnownPrompt,
    PromptPart,
    StartRefusal,
    Stats,
    Submit,
    SubmitAlike,
    ToClient,
    ToEngine,
    Welcome,
    encode_frame,
    submission,
    submitted,
    to_client_decoder,
    to_engine_decoder,
)
from openinfer_core.request import RetainedPrefix
from openinfer_core.sampling import MAX_TOKEN_ID, MAX_TOKENS, Grammar, GrammarKind

REQUEST = GenerateRequest(request_id=RequestId(5), prompt_token_ids=(1, 2), sampling=SamplingParams(max_tokens=4))
INFO = EngineInfo(
    model="m",
    family="f",
    max_model_tokens=64,
    num_token_ids=10,
    eos_token_ids=(9,),
    block_size_tokens=16,
    num_blocks=4,
    max_num_seqs=2,
    max_waiting=8,
)
EVENTS = Events([Tokens(RequestId(5), (7, 300)), Failed(RequestId(70000), FailureKind.OVERLOADED, "full")])

# Recorded when the format was made: never change one of these.
ARRAYS: dict[bytes, ToEngine | ToClient] = {
    b"\x0e\0\0\0\x92\xa5hello\xa6secret": Hello("secret"),
    b"\x14\0\0\0\x92\xabbrief_hello\xa6secret": BriefHello("secret"),
    b"\x0c\0\0\0\x92\xa7refusal\xa2no": StartRefusal("no"),
    b"\x08\0\0\0\x92\xa5abort\x05": Abort(RequestId(5)),
    b"\x1c\0\0\0\x93\xabprompt_part\x92\x01\x02\x91\x92\x03\xcb@\x10\0\0\0\0\0\0": PromptPart(
        (1, 2), (RetainedPrefix(3, 4.0),)
    ),
    b"\x1f\0\0\0\x96\xacknown_prompt\x01\x02\x03\x91\x02\x91\x92\x03\xcb@\x10\0\0\0\0\0\0": KnownPrompt(
        1, 2, 3, (2,), (RetainedPrefix(3, 4.0),)
    ),
    b"\x0b\0\0\0\x91\xa9ask_stats": AskStats(),
    b"\x07\0\0\0\x91\xa5close": Close(),
    b"'\0\0\0\x92\xa1e\x92\x95\xa1t\x05\x92\x07\xcd\x01,\xc0\xc0\x94\xa1e\xce\0\x01\x11p\xaaoverloaded\xa4full": EVENTS,
}
# What holds a map may gain keys; what was sent with the keys of the first release must still be understood.
MAPS: dict[bytes, ToEngine | ToClient] = {
    b"\x92\xa6submit\x83\xaarequest_id\x05\xb0prompt_token_ids\x92\x01\x02\xa8sampling\x81\xaamax_tokens\x04": Submit(
        REQUEST
    ),
    b"\x92\xacsubmit_alike\x83\xaarequest_id\x05\xb0prompt_token_ids\x92\x01\x02\xa8sampling\x81\xaamax_tokens\x04": (
        SubmitAlike(REQUEST)
    ),
    b"\x92\xa5stats\x81\xa7running\x01": Stats(EngineStats(running=1)),
    b"\x92\xa7welcome\x8a\xa5model\xa1m\xa6family\xa1f\xb0max_model_tokens@\xadnum_token_ids\n\xadeos_token_ids\x91\t"
    b"\xb1block_size_tokens\x10\xaanum_blocks\x04\xacmax_num_seqs\x02\xabmax_waiting\x08\xabcomposition\x80": Welcome(
        INFO
    ),
}
TO_ENGINE = (
    Hello("secret"),
    BriefHello("secret"),
    Submit(REQUEST),
    SubmitAlike(REQUEST),
    KnownPrompt(3, None, 0),
    PromptPart((1, 2)),
    Abort(RequestId(5)),
    AskStats(),
    Close(),
)
TO_CLIENT = (Welcome(INFO), StartRefusal("no"), EVENTS, Stats(EngineStats(step_age_s=0.5)))


def decode(message: ToEngine | ToClient, body: bytes) -> ToEngine | ToClient:
    return to_engine_decoder.decode(body) if isinstance(message, ToEngine) else to_client_decoder.decode(body)


@pytest.mark.parametrize("recorded", ARRAYS)
def test_message_keeps_its_recorded_bytes(recorded: bytes) -> None:
    message = ARRAYS[recorded]
    assert bytes(encode_frame(message)) == recorded
    assert decode(message, recorded[4:]) == message


@pytest.mark.parametrize("recorded", MAPS)
def test_message_with_the_first_releases_keys_is_understood(recorded: bytes) -> None:
    assert decode(MAPS[recorded], recorded) == MAPS[recorded]


@pytest.mark.parametrize("message", TO_ENGINE + TO_CLIENT, ids=lambda message: type(message).__name__)
def test_message_survives_its_frame(message: ToEngine | ToClient) -> None:
    frame = encode_frame(message)
    assert struct.unpack_from("<I", frame) == (len(frame) - 4,)
    (body,) = FrameBuffer().feed(bytes(frame))
    assert decode(message, body) == message


def test_messages_of_one_direction_are_refused_in_the_other() -> None:
    for message in TO_CLIENT:
        with pytest.raises(msgspec.ValidationError):
            to_engine_decoder.decode(bytes(encode_frame(message)[4:]))
    for message in TO_ENGINE:
        with pytest.raises(msgspec.ValidationError):
            to_client_decoder.decode(bytes(encode_frame(message)[4:]))


def test_submit_out_of_range_is_refused_when_it_is_decoded() -> None:
    body = msgspec.msgpack.encode(
        ["submit", {"request_id": 1, "prompt_token_ids": [1], "sampling": {"max_tokens": 1, "temperature": -1.0}}]
    )
    with pytest.raises(msgspec.ValidationError, match=r"temperature is -1\.0") as caught:
        to_engine_decoder.decode(body)
    assert isinstance(caught.value.__cause__, InvalidRequest)


@given(bodies=st.lists(st.binary(max_size=300), max_size=12), data=st.data())
def test_frame_buffer_gives_the_same_frames_however_the_stream_is_cut(bodies: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(struct.pack("<I", len(body)) + body for body in bodies)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=20)))
    buffer, received = FrameBuffer(), []
    for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        received += buffer.feed(stream[begin:end])
    assert received == bodies
    assert len(buffer) == 0


def test_frame_buffer_holds_what_is_incomplete() -> None:
    buffer = FrameBuffer()
    assert buffer.feed(b"\x05\0\0\0abc") == []
    assert len(buffer) == 7
    assert buffer.feed(b"de\x01") == [b"abcde"]
    assert len(buffer) == 1


def test_frame_buffer_refuses_an_oversized_frame_from_its_length_alone() -> None:
    assert FrameBuffer().feed(struct.pack("<I", MAX_FRAME_BYTES)) == []
    with pytest.raises(ContractViolation, match=f"announces a frame of {MAX_FRAME_BYTES + 1} bytes"):
        FrameBuffer().feed(b"\x01\0\0\0x" + struct.pack("<I", MAX_FRAME_BYTES + 1))


def test_encode_frame_refuses_what_no_peer_would_take() -> None:
    with pytest.raises(ContractViolation, match="exceeds the limit"):
        encode_frame(StartRefusal("x" * MAX_FRAME_BYTES))


def with_grammar(grammar: Grammar | None) -> GenerateRequest:
    return msgspec.structs.replace(REQUEST, sampling=msgspec.structs.replace(REQUEST.sampling, grammar=grammar))


def test_grammar_of_many_outputs_is_sent_once() -> None:
    grammar = Grammar(kind=GrammarKind.REGEX, text="a" * 100_000)
    first, second = (submission(with_grammar(grammar), last=last) for last in (None, grammar))
    assert len(encode_frame(first)) > 100_000
    assert len(encode_frame(second)) < 1000
    known = submitted(first, last=None).sampling.grammar
    assert submitted(second, last=known) == with_grammar(grammar)
    assert submitted(second, last=known).sampling.grammar is known


@pytest.mark.parametrize("last", [None, Grammar(kind=GrammarKind.REGEX, text="b")])
def test_another_grammar_or_none_is_sent_as_it_is(last: Grammar | None) -> None:
    for grammar in (None, Grammar(kind=GrammarKind.REGEX, text="a"), Grammar(kind=GrammarKind.LARK, text="b")):
        request = with_grammar(grammar)
        message = submission(request, last=last)
        assert message == Submit(request)
        assert submitted(message, last=last) == request


def test_request_that_refers_to_no_grammar_is_a_broken_protocol() -> None:
    grammar = Grammar(kind=GrammarKind.REGEX, text="a")
    with pytest.raises(ContractViolation, match="there is none before it"):
        submitted(SubmitAlike(REQUEST), last=None)
    with pytest.raises(ContractViolation, match="it has its own"):
        submitted(SubmitAlike(with_grammar(grammar)), last=grammar)


def with_prompt(num_tokens: int, *retained_tokens: int) -> GenerateRequest:
    prefixes = tuple(RetainedPrefix(each, 60.0) for each in retained_tokens)
    return msgspec.structs.replace(REQUEST, prompt_token_ids=tuple(range(num_tokens)), retained_prefixes=prefixes)


@pytest.mark.parametrize("num_tokens", [1, PART_IDS, PART_IDS + 1, 2 * PART_IDS, 2 * PART_IDS + 1, 50_000])
@pytest.mark.parametrize("retains", [False, True])
def test_long_prompt_comes_in_parts_and_is_whole_again(num_tokens: int, retains: bool) -> None:
    request = with_prompt(num_tokens, *((1, num_tokens) if retains else ()))
    parts, rest = prompt_parts(request)
    whole = msgspec.structs.replace(request, highest_token_id=num_tokens - 1 if parts else None)
    frames = [encode_frame(message) for message in (*parts, Submit(rest))]
    assert max(map(len, frames)) < 4 * PART_IDS + 500
    buffer = PromptBuffer()
    for body in FrameBuffer().feed(b"".join(frames)):
        message = to_engine_decoder.decode(body)
        if isinstance(message, PromptPart):
            buffer.take(message)
        else:
            assert isinstance(message, Submit)
            assert buffer.complete(message.request) == whole
    assert buffer.complete(REQUEST) is REQUEST  # nothing is left of the one before


def test_parts_of_a_prompt_are_checked() -> None:
    for ids in ([-1], [MAX_TOKEN_ID + 1], [True], ["1"], [1.0]):
        with pytest.raises(msgspec.ValidationError):
            to_engine_decoder.decode(msgspec.msgpack.encode(["prompt_part", ids]))
    buffer, part = PromptBuffer(), PromptPart((7,) * 2**20)
    for _ in range(MAX_TOKENS // 2**20):
        buffer.take(part)
    with pytest.raises(ContractViolation, match="more than"):
        buffer.take(PromptPart((1,)))
    with pytest.raises(ContractViolation, match="does not belong"):
        buffer.complete(REQUEST)
    buffer.take(PromptPart((1,), (RetainedPrefix(9, 60.0),)))
    with pytest.raises(ContractViolation, match="does not belong"):
        buffer.complete(with_prompt(2))
